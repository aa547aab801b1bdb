// What the three algorithms share: arguments, workspaces, waiting, and packs of 16 bytes.
//
//   workspace      one per replica: a state of kStateBytes per block, then scratch per block.
//                  Zeroed once. Counters in it only grow, and are compared by signed difference
//   chunk i of n   as torch.tensor_split cuts a flat tensor; replica i finishes it
//   packs          pack p starts at element p * kLanes<T> of the tensor, for all chunks. A pack
//                  that two chunks share, and a tensor that is not aligned, are moved by elements;
//                  only `deal_out` distinguishes these cases
//   known          the number of replicas, the members of an island, and the operation are
//                  compiled in, so that a thread reads several packs of all replicas before it
//                  combines any: it waits for memory once, not once per replica
#pragma once

#include "portable.h"

constexpr int kMaxReplicas = 16;
constexpr int kPackBytes = 16;
// The state of one block in a replica's workspace: flags of 128 bytes each, and counters.
constexpr int kStateBytes = 4096;

// The arguments of every kernel; mirror/comm/kernels/launcher.py has the same structure.
struct Arguments {
  void* data[kMaxReplicas];       // the tensor of each replica
  void* workspace[kMaxReplicas];  // of each replica: a state per block, then scratch per block
  void* errors;                   // one Flag per replica, readable by the host; 0 is no error
  long long count;                // elements in each tensor
  long long scratch_bytes;        // of one block, a multiple of 2 * kPackBytes
  long long timeout_ns;           // counted from the start of the kernel
  double scale;
  int num_replicas;
  int op;
  int root;
  int element_bytes;           // for kernels that only copy bytes
  int state_blocks;            // blocks for which the workspaces have room
  int island_size;             // replicas per island
  int rounds;                  // whether partial sums travel as elements; see PartialOf
  int call;                    // number of the call, for error words
  int rows[kMaxReplicas];      // the replica of row i of this launch's grid
  int order[kMaxReplicas];     // the replicas sorted by island
  int position[kMaxReplicas];  // of each replica in `order`
};

// Arguments that are known when a kernel is compiled. A value of 0, or kAnyOp, is read from the
// arguments instead: simulated devices have no compiler, and would need all variants. Copies need
// no known values.
constexpr int kAnyOp = -1;
template <int kReplicas, int kIsland, int kOp, bool kRoundsPartials = false>
struct Known {
  static constexpr bool kRounds = kRoundsPartials;
  static constexpr bool kIsOpKnown = kOp != kAnyOp;
  static constexpr int kMostReplicas = kReplicas != 0 ? kReplicas : kMaxReplicas;
  static constexpr int kMostMembers = kIsland != 0 ? kIsland : kMaxReplicas;
  static constexpr int kMostIslands = kIsland != 0 ? kMostReplicas / kMostMembers : kMaxReplicas;

  DEVICE static int replicas(const Arguments& a) {
    return kReplicas != 0 ? kReplicas : a.num_replicas;
  }
  DEVICE static int members(const Arguments& a) {
    return kIsland != 0 ? kIsland : a.island_size;
  }
  DEVICE static int islands(const Arguments& a) { return replicas(a) / members(a); }
  DEVICE static int op(const Arguments& a) { return kIsOpKnown ? kOp : a.op; }
};

// A replica within one launch, and how long it may wait.
struct Self {
  int id;
  long long deadline_ns;
};

DEVICE Self self_of(const Arguments& a) {
  const long long now = now_ns();
  const long long most = 0x7fffffffffffffff - now;
  return {a.rows[device_row()], now + (a.timeout_ns < most ? a.timeout_ns : most)};
}

// Waits until the flag has reached `target`, by signed difference, so counters may wrap around.
//
// Returns false at the deadline, and sets the replica's error word to the call and the awaited
// replica. Once its error word is set, a replica does not wait again, so that it ends soon.
DEVICE bool wait_until(const Arguments& a, const Self& self, const Flag* flag, unsigned target,
                       int awaited) {
  constexpr unsigned kSpinsPerLookAtTheClock = 64;
  Flag* error = static_cast<Flag*>(a.errors) + self.id;
  for (unsigned spins = 1; static_cast<int>(load_acquire(flag) - target) < 0; ++spins) {
    relax();
    if (spins % kSpinsPerLookAtTheClock != 0) continue;
    if (load_acquire(error) != 0) return false;
    if (now_ns() < self.deadline_ns) continue;
    store_release(error, 0x80000000u | static_cast<unsigned>(a.call & 0x7fffff) << 8 |
                             static_cast<unsigned>(awaited));
    return false;
  }
  return true;
}

// ---------------------------------------------------------------- workspaces

template <class State>
DEVICE State* state_of(const Arguments& a, int replica) {
  static_assert(sizeof(State) <= kStateBytes, "a block's state outgrew its place");
  char* base = static_cast<char*>(a.workspace[replica]);
  return reinterpret_cast<State*>(base + static_cast<long long>(block_id()) * kStateBytes);
}

DEVICE char* scratch_of(const Arguments& a, int replica) {
  char* base = static_cast<char*>(a.workspace[replica]);
  return base + static_cast<long long>(a.state_blocks) * kStateBytes +
         block_id() * a.scratch_bytes;
}

// Flags for kernels in which any replica may signal its progress to any other.
//
// Each flag has one writer, and counts its progress. `epoch` is where a call starts counting; all
// replicas leave a call with the same one.
struct Mailbox {
  Flag from[kMaxReplicas];
  unsigned epoch;
};

// Ends a call: the next one starts counting here. The block must have had a barrier since it read
// the epoch.
DEVICE void leave(Mailbox* mail, unsigned epoch) {
  if (thread_id() == 0) mail->epoch = epoch;
}

// Publishes what the block wrote to the replicas of a group, and acquires what they published.
// The group is the replicas at `first`, `first + stride`, ... in `a.order`, `size` in all.
DEVICE bool meet(const Arguments& a, const Self& self, unsigned epoch, int first, int stride,
                 int size) {
  publish_barrier();
  bool late = false;
  for (int i = thread_id(); i < size; i += num_threads()) {
    const int peer = a.order[first + i * stride];
    if (peer != self.id) store_release(&state_of<Mailbox>(a, peer)->from[self.id], epoch);
  }
  for (int i = thread_id(); i < size; i += num_threads()) {
    const int peer = a.order[first + i * stride];
    if (peer == self.id) continue;
    late |= !wait_until(a, self, &state_of<Mailbox>(a, self.id)->from[peer], epoch, peer);
  }
  return !block_any(late);
}

// ---------------------------------------------------------------- chunks and packs

// Elements of a tensor, from `begin` up to `end`.
struct Range {
  long long begin, end;
};

template <class T>
constexpr int kLanes = kPackBytes / static_cast<int>(sizeof(T));

DEVICE long long min_of(long long a, long long b) { return a < b ? a : b; }
DEVICE long long max_of(long long a, long long b) { return a > b ? a : b; }

// Chunk `i` of `n`, in units of T. Kernels that copy see bytes, and cut between elements.
template <class T>
DEVICE Range chunk_of(const Arguments& a, int i, int n) {
  const long long unit = sizeof(T) == 1 ? a.element_bytes : 1;
  const long long length = a.count / n, longer = a.count % n;
  const long long begin = i * length + min_of(i, longer);
  return {begin * unit, (begin + length + (i < longer)) * unit};
}

// How chunks are cut: every block has the same number of packs, and works on them in segments. The
// cut is the same for all chunks and on all replicas, so that they count the same messages.
struct Cut {
  long long packs_per_block, packs_per_segment, num_segments;
};

// For kernels that stage nothing: a block's part of a chunk is one segment.
inline constexpr long long kWholeChunk = 1ll << 60;

template <class T>
DEVICE Cut cut_chunks(const Arguments& a, int n, long long segment_bytes) {
  const long long longest = (a.count + n - 1) / n * (sizeof(T) == 1 ? a.element_bytes : 1);
  // A chunk of one pack's length touches two packs if it starts inside a pack.
  const long long packs = (longest + kLanes<T> - 1) / kLanes<T> + 1;
  const long long per_block = (packs + num_blocks() - 1) / num_blocks();
  const long long per_segment = segment_bytes / (kLanes<T> * sizeof(Total<T>));
  return {per_block, per_segment, (per_block + per_segment - 1) / per_segment};
}

// This block's part of segment `s` of a chunk; empty where the chunk has none.
template <class T>
DEVICE Range segment_of(const Range& chunk, const Cut& cut, long long s) {
  const long long part = chunk.begin / kLanes<T> + block_id() * cut.packs_per_block;
  const long long first = part + s * cut.packs_per_segment;
  const long long last = part + min_of((s + 1) * cut.packs_per_segment, cut.packs_per_block);
  const long long begin = max_of(chunk.begin, first * kLanes<T>);
  return {begin, max_of(begin, min_of(chunk.end, last * kLanes<T>))};
}

// The part of a thread: kCount places of kWidth elements each, whole packs or single elements.
template <int kPlaceWidth, int kPlaceCount>
struct Places {
  static constexpr int kWidth = kPlaceWidth, kCount = kPlaceCount;
  long long first, stride;  // in elements
  DEVICE long long operator[](int i) const { return first + i * stride; }
  // The same places in a scratch that begins with element `origin`.
  DEVICE Places from(long long origin) const { return {first - origin, stride}; }
};

// How many packs a thread works on at once that reads so many times 16 bytes for each: 8 to 16
// loads are in flight then. By 32 blocks of 512 threads 2 to 4 MiB of a GPU, where 1.5 us at 450
// GB/s of NVLink are 0.7 MiB; and 16 loads are half of the 128 registers that a thread may have.
template <class K>
DEVICE constexpr int in_flight(int loads) {
  if (!K::kIsOpKnown) return 1;
  return loads <= 4 ? 4 : loads <= 8 ? 2 : 1;
}

// Deals a range out to the threads of the block: whole packs, kPacks at once while there are so
// many, then one; at last the elements around them, or all if tensors are not aligned.
template <class T, int kPacks, class Work>
DEVICE void deal_out(const Range& range, bool are_aligned, const Work& work) {
  constexpr int kWidth = kLanes<T>;
  Range whole = {(range.begin + kWidth - 1) / kWidth * kWidth, range.end / kWidth * kWidth};
  if (!are_aligned || whole.begin >= whole.end) whole = {range.begin, range.begin};
  const long long stride = static_cast<long long>(num_threads()) * kWidth;
  long long at = whole.begin + thread_id() * kWidth;
  if constexpr (kPacks > 1) {
    for (; at + (kPacks - 1) * stride < whole.end; at += kPacks * stride) {
      work(Places<kWidth, kPacks>{at, stride});
    }
  }
  for (; at < whole.end; at += stride) work(Places<kWidth, 1>{at, 0});
  const long long head = whole.begin - range.begin, tail = range.end - whole.end;
  for (long long i = thread_id(); i < head + tail; i += num_threads()) {
    work(Places<1, 1>{i < head ? range.begin + i : whole.end + (i - head), 0});
  }
}

// Where in memory a segment's first pack would be, in elements: scratch begins with it.
template <class T>
DEVICE long long origin_of(const Range& range) {
  return range.begin / kLanes<T> * kLanes<T>;
}

DEVICE bool is_aligned(const void* tensor) { return address_of(tensor) % kPackBytes == 0; }

DEVICE bool are_aligned(const Arguments& a) {
  bool all = true;
  for (int r = 0; r < a.num_replicas; ++r) all &= is_aligned(a.data[r]);
  return all;
}

// The unit of a read or write: 16 bytes of a pack, or an element.
template <class T, int kWidth>
struct WordOf {
  using Type = Vector16;
};
template <class T>
struct WordOf<T, 1> {
  using Type = T;
};

// The elements of some places, in registers. Their totals are elements, too: of type Total<T>.
template <class T, class At>
struct Elements {
  using Word = typename WordOf<T, At::kWidth>::Type;
  static constexpr int kWords = At::kWidth * static_cast<int>(sizeof(T)) / sizeof(Word);
  union {
    Word word[At::kCount][kWords];
    T lane[At::kCount * At::kWidth];
  };
};

template <class T, class At>
DEVICE Elements<T, At> read(const T* tensor, const At& at) {
  using Word = typename Elements<T, At>::Word;
  Elements<T, At> elements;
  UNROLL
  for (int i = 0; i < At::kCount; ++i) {
    const Word* from = reinterpret_cast<const Word*>(tensor + at[i]);
    UNROLL
    for (int w = 0; w < Elements<T, At>::kWords; ++w) elements.word[i][w] = from[w];
    tell_moved(from, sizeof elements.word[i], false);
  }
  return elements;
}

template <class T, class At>
DEVICE void write(T* tensor, const At& at, const Elements<T, At>& elements) {
  using Word = typename Elements<T, At>::Word;
  UNROLL
  for (int i = 0; i < At::kCount; ++i) {
    Word* to = reinterpret_cast<Word*>(tensor + at[i]);
    UNROLL
    for (int w = 0; w < Elements<T, At>::kWords; ++w) to[w] = elements.word[i][w];
    tell_moved(to, sizeof elements.word[i], true);
  }
}

template <class T, class At>
using Totals = Elements<Total<T>, At>;

template <class T, class At>
DEVICE Totals<T, At> widened(const Elements<T, At>& elements) {
  Totals<T, At> totals;
  UNROLL
  for (int i = 0; i < At::kCount * At::kWidth; ++i) totals.lane[i] = widened(elements.lane[i]);
  return totals;
}

// Scales, rounds once if T is a half type; the result is ready to be written, anywhere.
template <class T, class At>
DEVICE Elements<T, At> finished(const Totals<T, At>& totals, double scale) {
  Elements<T, At> elements;
  UNROLL
  for (int i = 0; i < At::kCount * At::kWidth; ++i) {
    elements.lane[i] = finished<T>(totals.lane[i], scale);
  }
  return elements;
}

// left = left op right.
template <class K, class T, class At>
DEVICE void combine(const Arguments& a, Totals<T, At>& left, const Elements<T, At>& right) {
  UNROLL
  for (int i = 0; i < At::kCount * At::kWidth; ++i) {
    left.lane[i] = combined<T>(K::op(a), left.lane[i], widened(right.lane[i]));
  }
}

// Combines the same places of `n` tensors in the order 0, 1, ...; reads all before it combines
// any. `tensor_of(i)` is one of them, kMost how many there are at most: n itself where it is
// known.
template <class T, class K, int kMost, class At, class TensorOf>
DEVICE Totals<T, At> read_combined(const Arguments& a, int n, const At& at,
                                   const TensorOf& tensor_of) {
  Elements<T, At> terms[kMost];
  terms[0] = read<T>(tensor_of(0), at);
  UNROLL_KNOWN
  for (int i = 1; i < n && i < kMost; ++i) terms[i] = read<T>(tensor_of(i), at);
  Totals<T, At> totals = widened(terms[0]);
  UNROLL_KNOWN
  for (int i = 1; i < n; ++i) combine<K>(a, totals, terms[i]);
  return totals;
}

// The type of a partial sum in messages and in scratch, in whole, aligned packs: that of
// registers, float32 for half types, so that a result is rounded once. If K says so, it is rounded
// to an element at every hop instead, which halves the bytes. A minimum or maximum loses nothing
// by that.
template <class T, bool kRounds>
struct PartialOf {
  using Type = Total<T>;
};
template <class T>
struct PartialOf<T, true> {
  using Type = T;
};
template <class T, class K>
using Partial = typename PartialOf<T, K::kRounds>::Type;

// How many 16 bytes a pack of partial sums is.
template <class T, class K>
constexpr int kVectors = static_cast<int>(sizeof(Partial<T, K>) / sizeof(T));

template <class T, class K, class At>
DEVICE Elements<Partial<T, K>, At> partial(const Totals<T, At>& totals) {
  if constexpr (sizeof(Partial<T, K>) == sizeof(Total<T>)) {
    return totals;
  } else {
    Elements<T, At> elements;
    UNROLL
    for (int i = 0; i < At::kCount * At::kWidth; ++i) {
      elements.lane[i] = narrowed<T>(totals.lane[i]);
    }
    return elements;
  }
}

// The kernel of a template, under a name without mangling. Macros select what is compiled: for
// reductions an element type, an operation, the numbers of replicas and of members of an island (0
// if the source does not need them), and whether partial sums are rounded; MIRROR_COPIES for the
// copies, which work on bytes; MIRROR_THREADS how many threads a block has. 65,536 registers are
// divided among them: one block always fits on a multiprocessor, so a grid of at most as many
// blocks as there are multiprocessors is resident as a whole. mirror/comm/kernels/cuda_kernels.py
// defines the macros; simulate.cpp instantiates the templates itself.
//
// A launch without elements ends at once, in any grid: it accesses no memory, signals to no replica
// and waits for none, and no epoch or counter moves. No collective is launched so; _warm_up in
// mirror/comm/kernels/cuda_kernels.py does it.
#define MIRROR_KERNEL_OF(name, Element, Given)                     \
  extern "C" __global__ void __launch_bounds__(MIRROR_THREADS, 1)  \
      name##_kernel(const __grid_constant__ Arguments arguments) { \
    if (arguments.count != 0) name<Element, Given>(arguments);     \
  }
#ifdef MIRROR_ELEMENT
using Given = Known<MIRROR_REPLICAS, MIRROR_ISLAND, MIRROR_OP, MIRROR_ROUNDS>;
#define MIRROR_REDUCTION(name) MIRROR_KERNEL_OF(name, MIRROR_ELEMENT, Given)
#else
#define MIRROR_REDUCTION(name)
#endif
// Copies combine nothing: any operation will do.
using ForCopies = Known<0, 0, kSum>;
#ifdef MIRROR_COPIES
#define MIRROR_COPY(name) MIRROR_KERNEL_OF(name, unsigned char, ForCopies)
#else
#define MIRROR_COPY(name)
#endif
