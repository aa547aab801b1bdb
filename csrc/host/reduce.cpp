// Collectives over replicas in host memory, with a C ABI for ctypes:
// mirror/comm/host_backends.py.
//
//   traffic       all-reduce: n * bytes read and n * bytes written, the least there is
//   best for      every size: small messages stay in the calling thread, large ones are shared
//   needs         outputs alias no other replica's input; nothing else of the memory
//   determinism   each element is reduced by one thread, in replica order: equal bits for any
//                 number of threads, instruction set, packing and alignment
//
// Stores are ordinary ones. An output is also an input, so its cache line was read just before;
// non-temporal stores have to throw that line out and took twice as long (n = 2, 4, 8; 64 MiB).

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <system_error>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include "condition.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

static_assert(sizeof(void*) == 8, "addresses come as 64-bit integers");

namespace mirror {
namespace {

// Numbered as in mirror/comm/host_backends.py.
enum class Op { kSum, kMin, kMax, kProd };
constexpr int kNumOps = 4;
constexpr int kNumDTypes = 7;
constexpr std::array<int, kNumDTypes> kItemBytes = {4, 8, 2, 2, 4, 8, 1};

// Where one tensor (or a chunk of one) comes from and goes to, one address per replica.
struct Pointers {
  void* const* inputs;
  int num_inputs;
  void* const* outputs;
  int num_outputs;
  double scale;
};

using Reducer = void (*)(const Pointers&, std::int64_t begin, std::int64_t end);

#define MIRROR_LEVEL portable
#define MIRROR_VECTOR_BYTES 16
#include "reduce_kernels.h"
#undef MIRROR_LEVEL
#undef MIRROR_VECTOR_BYTES

#if defined(__x86_64__)
#pragma GCC push_options
#pragma GCC target("avx2,f16c")
#define MIRROR_LEVEL avx2
#define MIRROR_VECTOR_BYTES 32
#include "reduce_kernels.h"
#undef MIRROR_LEVEL
#undef MIRROR_VECTOR_BYTES
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,f16c")
#define MIRROR_LEVEL avx512
#define MIRROR_VECTOR_BYTES 64
#include "reduce_kernels.h"
#undef MIRROR_LEVEL
#undef MIRROR_VECTOR_BYTES
#pragma GCC pop_options
#endif

// Instruction sets, slowest first. Level i is the i-th entry.
struct Level {
  const char* name;
  bool (*is_supported)();
  const std::array<std::array<Reducer, kNumOps>, kNumDTypes>* reducers;
};

constexpr Level kLevels[] = {
    {"portable", [] { return true; }, &portable::kReducers},
#if defined(__x86_64__)
    {"avx2",
     [] {
       unsigned a, b, c, d;
       return __builtin_cpu_supports("avx2") && __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
     },
     &avx2::kReducers},
    {"avx512",
     [] {
       return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
              __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
     },
     &avx512::kReducers},
#endif
};
constexpr int kNumLevels = static_cast<int>(std::size(kLevels));

int best_level() {
#if defined(__x86_64__)
  __builtin_cpu_init();
#endif
  int level = kNumLevels - 1;
  while (!kLevels[level].is_supported()) --level;
  return level;
}

std::atomic<int> chosen_level{best_level()};

// The calling thread decides on flush-to-zero and similar modes, and its helpers copy them;
// otherwise the bits would depend on which thread does what.
#if defined(__x86_64__)
unsigned float_mode() { return _mm_getcsr(); }
void set_float_mode(unsigned mode) { _mm_setcsr(mode); }
#else
unsigned float_mode() { return 0; }
void set_float_mode(unsigned) {}
#endif

// `count` elements that are reduced together.
struct Segment {
  Pointers to;
  std::int64_t count;
};

// The bytes of each replica in one ticket: few enough to share the work evenly with a thread that
// starts late, many enough that taking a ticket costs nothing.
constexpr std::int64_t kTicketBytes = 128 << 10;
// In the common numbering of elements each segment begins at a multiple of this, so that tickets
// end between cache lines where the tensors do begin at one.
constexpr std::int64_t kGrain = 64;

// All segments of one collective, cut into tickets. Any number of threads may call `help`.
class Work {
 public:
  Work(const std::vector<Segment>& segments, Reducer reducer, int item_bytes)
      : segments_(segments), reducer_(reducer), mode_(float_mode()) {
    starts_.reserve(segments.size());
    for (const Segment& segment : segments) {
      starts_.push_back(end_);
      end_ += (segment.count + kGrain - 1) / kGrain * kGrain;
      touched_bytes_ +=
          segment.count * item_bytes * (segment.to.num_inputs + segment.to.num_outputs);
    }
    per_ticket_ = kTicketBytes / item_bytes;
  }

  std::int64_t touched_bytes() const { return touched_bytes_; }
  std::int64_t num_tickets() const { return (end_ + per_ticket_ - 1) / per_ticket_; }

  // Takes tickets until there are none. Relaxed: only the number must be unique; the mutex of
  // Helpers publishes what the threads write.
  void help() {
    for (;;) {
      const std::int64_t begin = next_.fetch_add(per_ticket_, std::memory_order_relaxed);
      if (begin >= end_) return;
      do_range(begin, std::min(begin + per_ticket_, end_));
    }
  }

  void help_as_another_thread() {
    set_float_mode(mode_);
    help();
  }

 private:
  void do_range(std::int64_t begin, std::int64_t end) const {
    const auto after = std::upper_bound(starts_.begin(), starts_.end(), begin);
    for (std::size_t s = after - starts_.begin() - 1; s < starts_.size(); ++s) {
      if (starts_[s] >= end) return;
      const Segment& segment = segments_[s];
      const std::int64_t from = std::max<std::int64_t>(begin - starts_[s], 0);
      const std::int64_t to = std::min(end - starts_[s], segment.count);
      if (from >= to) continue;
      reducer_(segment.to, from, to);
    }
  }

  const std::vector<Segment>& segments_;
  const Reducer reducer_;
  const unsigned mode_;
  std::vector<std::int64_t> starts_;
  std::int64_t end_ = 0;
  std::int64_t per_ticket_ = 0;
  std::int64_t touched_bytes_ = 0;
  std::atomic<std::int64_t> next_{0};
};

// Threads that help the calling one. The caller never waits for a helper to start: it takes
// tickets itself, and a late helper finds none. So a forked process, which has no helpers, is only
// slower; and of two concurrent callers, the second one works alone.
//
// Synchronisation: mutex_ guards all members. Under it, a caller publishes its work, a helper
// joins (acquires the work) and leaves (publishes what it wrote), and the caller sees that no
// helper is left. That last wait is bounded by the one ticket that each helper still has.
class Helpers {
 public:
  void run(Work& work, int num_helpers) {
    const bool leads = num_helpers > 0 && invite(work, num_helpers);
    work.help();
    if (!leads) return;
    std::unique_lock lock(mutex_);
    open_slots_ = 0;  // no helper joins from now on
    lock.unlock();
    for (int i = 0; i < kSpins && working_.load(std::memory_order_relaxed) > 0; ++i) pause();
    lock.lock();
    all_done_.wait(lock, [&] { return working_ == 0; });
    work_ = nullptr;
  }

 private:
  // A helper's last ticket takes some 10 us; sleeping and waking takes longer.
  static constexpr int kSpins = 2000;

  static void pause() {
#if defined(__x86_64__)
    _mm_pause();
#endif
  }

  bool invite(Work& work, int num_helpers) {
    const std::lock_guard lock(mutex_);
    if (work_ != nullptr) return false;
    try {
      for (; num_threads_ < num_helpers; ++num_threads_) {
        std::thread([this] { serve(); }).detach();
      }
    } catch (const std::system_error&) {  // the system allows no more threads: use fewer
    }
    work_ = &work;
    open_slots_ = num_helpers;
    work_arrived_.notify_all();
    return true;
  }

  void serve() {
    std::unique_lock lock(mutex_);
    for (;;) {
      work_arrived_.wait(lock, [&] { return open_slots_ > 0; });
      --open_slots_;
      ++working_;
      Work& work = *work_;
      lock.unlock();
      work.help_as_another_thread();
      lock.lock();
      if (--working_ == 0) all_done_.notify_all();
    }
  }

  std::mutex mutex_;
  Condition work_arrived_, all_done_;
  Work* work_ = nullptr;
  int open_slots_ = 0;
  int num_threads_ = 0;
  std::atomic<int> working_{0};
};

// Never destroyed: its threads may outlive main.
Helpers& helpers() {
  static Helpers* const instance = new Helpers;
  return *instance;
}

// For fewer bytes read and written, a helper would start too late.
constexpr std::int64_t kBytesWorthHelp = 2 << 20;

void run(const std::vector<Segment>& segments, Reducer reducer, int item_bytes, int num_threads) {
  Work work(segments, reducer, item_bytes);
  std::int64_t num_helpers = 0;
  if (work.touched_bytes() >= kBytesWorthHelp) {
    num_helpers = std::min<std::int64_t>(num_threads, work.num_tickets()) - 1;
  }
  helpers().run(work, static_cast<int>(num_helpers));
}

Reducer reducer_of(int dtype, int op) {
  return (*kLevels[chosen_level.load(std::memory_order_relaxed)].reducers)[dtype][op];
}

// Calls fn(i, first element, number of elements) for the chunks that torch.tensor_split makes.
template <class Fn>
void for_each_chunk(std::int64_t count, int n, Fn fn) {
  std::int64_t begin = 0;
  for (int i = 0; i < n; ++i) {
    const std::int64_t length = count / n + (i < count % n);
    fn(i, begin, length);
    begin += length;
  }
}

// The addresses of chunk i, begins[i] bytes into each tensor, for every i: n rows of n.
class ChunkTable {
 public:
  ChunkTable(void* const* addresses, std::int64_t count, int n, int item_bytes) : n_(n) {
    for_each_chunk(count, n, [&](int, std::int64_t begin, std::int64_t length) {
      lengths_.push_back(length);
      for (int r = 0; r < n; ++r) {
        table_.push_back(static_cast<char*>(addresses[r]) + begin * item_bytes);
      }
    });
  }
  void* const* row(int i) const { return table_.data() + static_cast<std::int64_t>(i) * n_; }
  std::int64_t length(int i) const { return lengths_[i]; }

 private:
  int n_;
  std::vector<void*> table_;
  std::vector<std::int64_t> lengths_;
};

// A "reduction" of bytes from one input; piece by piece, so that it is read from memory once.
void copy(const Pointers& to, std::int64_t begin, std::int64_t end) {
  constexpr std::int64_t kPiece = 16 << 10;
  const char* const input = static_cast<const char*>(to.inputs[0]);
  for (std::int64_t i = begin; i < end; i += kPiece) {
    for (int r = 0; r < to.num_outputs; ++r) {
      char* const output = static_cast<char*>(to.outputs[r]);
      if (output != input) std::memcpy(output + i, input + i, std::min(kPiece, end - i));
    }
  }
}

// The same for one output and multiples of 16 bytes at such addresses, past the caches.
void copy_past_caches(const Pointers& to, std::int64_t begin, std::int64_t end) {
#if defined(__x86_64__)
  const char* const input = static_cast<const char*>(to.inputs[0]);
  char* const output = static_cast<char*>(to.outputs[0]);
  for (std::int64_t i = begin; i < end; i += 16) {
    _mm_stream_si128(reinterpret_cast<__m128i*>(output + i),
                     _mm_load_si128(reinterpret_cast<const __m128i*>(input + i)));
  }
  _mm_sfence();
#else
  copy(to, begin, end);
#endif
}

}  // namespace
}  // namespace mirror

using namespace mirror;

extern "C" {

// In every function: `addresses` holds `num_replicas` addresses per tensor, tensor after tensor;
// counts are in elements; dtype and op are numbered as above. Arguments are not checked unless a
// function says so.

// Leaves scale * op(replicas) in all replicas.
void mirror_all_reduce(void* const* addresses, const std::int64_t* counts,
                       std::int64_t num_tensors, int num_replicas, int dtype, int op,
                       double scale, int num_threads) {
  if (num_replicas == 1 && scale == 1.0) return;
  std::vector<Segment> segments(num_tensors);
  for (std::int64_t t = 0; t < num_tensors; ++t) {
    void* const* const row = addresses + t * num_replicas;
    segments[t] = {{row, num_replicas, row, num_replicas, scale}, counts[t]};
  }
  run(segments, reducer_of(dtype, op), kItemBytes[dtype], num_threads);
}

// Leaves scale * sum(replicas) of tensor t in `to`, offsets[t] bytes from its beginning, zeros
// before the next one, and behind the last one's, at offsets[num_tensors], the tail. The replicas
// stay as they are.
void mirror_pack_sums(void* const* addresses, const std::int64_t* counts,
                      const std::int64_t* offsets, std::int64_t num_tensors, int num_replicas,
                      int dtype, double scale, const void* tail, std::int64_t tail_bytes, void* to,
                      int num_threads) {
  const int item_bytes = kItemBytes[dtype];
  char* const begin = static_cast<char*>(to);
  std::vector<void*> outputs(num_tensors);
  std::vector<Segment> segments(num_tensors);
  for (std::int64_t t = 0; t < num_tensors; ++t) {
    outputs[t] = begin + offsets[t];
    const std::int64_t end = offsets[t] + counts[t] * item_bytes;
    std::memset(begin + end, 0, offsets[t + 1] - end);
    segments[t] = {{addresses + t * num_replicas, num_replicas, &outputs[t], 1, scale}, counts[t]};
  }
  std::memcpy(begin + offsets[num_tensors], tail, tail_bytes);
  run(segments, reducer_of(dtype, static_cast<int>(Op::kSum)), item_bytes, num_threads);
}

// Leaves chunk i of op(replicas) in chunk i of replica i.
void mirror_reduce_scatter(void* const* addresses, std::int64_t count, int num_replicas, int dtype,
                           int op, int num_threads) {
  const ChunkTable chunks(addresses, count, num_replicas, kItemBytes[dtype]);
  std::vector<Segment> segments(num_replicas);
  for (int i = 0; i < num_replicas; ++i) {
    segments[i] = {{chunks.row(i), num_replicas, chunks.row(i) + i, 1, 1.0}, chunks.length(i)};
  }
  run(segments, reducer_of(dtype, op), kItemBytes[dtype], num_threads);
}

// Copies chunk i of replica i to all.
void mirror_all_gather(void* const* addresses, std::int64_t count, int num_replicas, int dtype,
                       int num_threads) {
  const int item_bytes = kItemBytes[dtype];
  const ChunkTable chunks(addresses, count, num_replicas, item_bytes);
  std::vector<Segment> segments(num_replicas);
  for (int i = 0; i < num_replicas; ++i) {
    void* const* const row = chunks.row(i);
    segments[i] = {{row + i, 1, row, num_replicas, 1.0}, chunks.length(i) * item_bytes};
  }
  run(segments, copy, 1, num_threads);
}

// Copies the tensor of replica `root` to all.
void mirror_broadcast(void* const* addresses, std::int64_t count, int num_replicas, int dtype,
                      int root, int num_threads) {
  run({{{addresses + root, 1, addresses, num_replicas, 1.0}, count * kItemBytes[dtype]}}, copy, 1,
      num_threads);
}

// The baseline of benchmarks: a copy with ordinary stores, or past the caches. Addresses and sizes
// are multiples of 16 bytes.
void mirror_stream_copy(void* to, void* from, std::int64_t bytes, int past_caches,
                        int num_threads) {
  run({{{&from, 1, &to, 1, 1.0}, bytes}}, past_caches ? copy_past_caches : copy, 1, num_threads);
}

// Whether two of the tensors share memory; tensors are contiguous from their address on.
int mirror_overlap(void* const* addresses, const std::int64_t* bytes, std::int64_t num_tensors,
                   int num_replicas) {
  std::vector<std::pair<const char*, const char*>> spans;
  spans.reserve(num_tensors * num_replicas);
  for (std::int64_t i = 0; i < num_tensors * num_replicas; ++i) {
    const char* const begin = static_cast<const char*>(addresses[i]);
    const std::int64_t length = bytes[i / num_replicas];
    if (length > 0) spans.emplace_back(begin, begin + length);
  }
  std::sort(spans.begin(), spans.end());
  for (std::size_t i = 1; i < spans.size(); ++i) {
    if (spans[i].first < spans[i - 1].second) return 1;
  }
  return 0;
}

// Forces an instruction set, for tests; returns 0, or -1 if this CPU lacks it.
int mirror_set_level(int level) {
  if (level < 0 || level >= kNumLevels || !kLevels[level].is_supported()) return -1;
  chosen_level = level;
  return 0;
}

int mirror_level() { return chosen_level; }

// The name of a level, slowest first; null past the last.
const char* mirror_level_name(int level) {
  return level >= 0 && level < kNumLevels ? kLevels[level].name : nullptr;
}

}  // extern "C"
