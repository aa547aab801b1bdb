// Simulated devices: runs the CUDA kernels on CPU threads, behind a C ABI.
//
// One OS thread per CUDA thread. A replica's calls run one after the other, as on a stream; those
// of different replicas run concurrently, as on devices, and may be any number of calls apart.
#include <array>
#include <cstring>
#include <memory>
#include <system_error>
#include <vector>

#include "../direct.cu"
#include "../hierarchical.cu"
#include "../ring.cu"

namespace {

using Kernel = void (*)(const Arguments&);

// Every number of replicas, and every operation.
using Any = Known<0, 0, kAnyOp>;

// The same with rounded partial sums, which differ only for half types.
using Rounding = Known<0, 0, kAnyOp, true>;

// In the order of mirror.comm.communicator.DTYPES. A race detector's program compiles in a
// fraction of the time with one type.
#ifdef MIRROR_ONLY_INT32
#define FOR_EACH_ELEMENT(name)                                                      \
  {                                                                                 \
    #name, { nullptr, nullptr, nullptr, nullptr, name<int, Any>, nullptr, nullptr } \
  }
#else
#define FOR_EACH_ELEMENT(name)                                                                  \
  {                                                                                             \
    #name, {                                                                                    \
      name<float, Any>, name<double, Any>, name<Half, Any>, name<BFloat16, Any>, name<int, Any>, \
          name<long long, Any>, name<unsigned char, Any>                                        \
    }                                                                                           \
  }
#endif
// Kernels that only copy work on bytes.
#define FOR_BYTES(name)                                                                           \
  {                                                                                               \
    #name, {                                                                                      \
      nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, name<unsigned char, ForCopies>        \
    }                                                                                             \
  }

constexpr int kNumElements = 7, kHalfElement = 2, kBFloat16Element = 3;

struct Entry {
  const char* name;
  std::array<Kernel, kNumElements> by_element;
};

const Entry kKernels[] = {
    FOR_EACH_ELEMENT(direct_one_shot),
    FOR_EACH_ELEMENT(direct_two_shot),
    FOR_EACH_ELEMENT(direct_reduce_scatter),
    FOR_BYTES(direct_all_gather),
    FOR_BYTES(direct_broadcast),
    FOR_EACH_ELEMENT(ring_all_reduce),
    FOR_EACH_ELEMENT(ring_reduce_scatter),
    FOR_BYTES(ring_all_gather),
    FOR_BYTES(ring_broadcast),
    FOR_EACH_ELEMENT(hierarchical_all_reduce),
    FOR_EACH_ELEMENT(hierarchical_reduce_scatter),
    FOR_BYTES(hierarchical_all_gather),
    FOR_BYTES(hierarchical_broadcast),
};

// Kernels for which replicas and the operation are compiled in, as all are on GPUs: sums of one
// type for a few numbers of replicas, so that the GPUs' variants are tested here as well.
#ifdef MIRROR_ONLY_INT32
using KnownElement = int;
constexpr int kKnownElement = 4;
#define FOR_EACH_KNOWN(DIRECT, RING, ISLANDS) \
  DIRECT(3), DIRECT(6), DIRECT(8), RING, ISLANDS(3, 3), ISLANDS(6, 3), ISLANDS(8, 4)
#else
using KnownElement = float;
constexpr int kKnownElement = 0;
#define FOR_EACH_KNOWN(DIRECT, RING, ISLANDS) \
  DIRECT(4), RING, ISLANDS(4, 2)
#endif

struct KnownEntry {
  const char* name;
  int replicas, island;  // 0: any
  Kernel kernel;
};

#ifndef MIRROR_ONLY_INT32
struct RoundingEntry {
  const char* name;
  Kernel half, bfloat16;
};

#define ROUNDING_ENTRY(name) \
  { #name, name<Half, Rounding>, name<BFloat16, Rounding> }

const RoundingEntry kRoundingKernels[] = {
    ROUNDING_ENTRY(ring_all_reduce),
    ROUNDING_ENTRY(ring_reduce_scatter),
    ROUNDING_ENTRY(hierarchical_all_reduce),
    ROUNDING_ENTRY(hierarchical_reduce_scatter),
};

Kernel find_rounding_kernel(const char* name, int element) {
  for (const RoundingEntry& entry : kRoundingKernels) {
    if (std::strcmp(entry.name, name) != 0) continue;
    if (element == kHalfElement) return entry.half;
    if (element == kBFloat16Element) return entry.bfloat16;
  }
  return nullptr;
}
#else
Kernel find_rounding_kernel(const char*, int) { return nullptr; }
#endif

#define KNOWN_ENTRY(name, replicas, island) \
  { #name, replicas, island, name<KnownElement, Known<replicas, island, kSum>> }
#define KNOWN_DIRECT(replicas)                                                          \
  KNOWN_ENTRY(direct_one_shot, replicas, 0), KNOWN_ENTRY(direct_two_shot, replicas, 0), \
      KNOWN_ENTRY(direct_reduce_scatter, replicas, 0)
#define KNOWN_RING KNOWN_ENTRY(ring_all_reduce, 0, 0), KNOWN_ENTRY(ring_reduce_scatter, 0, 0)
#define KNOWN_ISLANDS(replicas, island)                     \
  KNOWN_ENTRY(hierarchical_all_reduce, replicas, island),   \
      KNOWN_ENTRY(hierarchical_reduce_scatter, replicas, island)

const KnownEntry kKnownKernels[] = {FOR_EACH_KNOWN(KNOWN_DIRECT, KNOWN_RING, KNOWN_ISLANDS)};

Kernel find_kernel(const char* name, int element, const Arguments& call) {
  for (const KnownEntry& entry : kKnownKernels) {
    if (std::strcmp(entry.name, name) == 0 && element == kKnownElement && call.op == kSum &&
        (entry.replicas == 0 || entry.replicas == call.num_replicas) &&
        (entry.island == 0 || entry.island == call.island_size)) {
      return entry.kernel;
    }
  }
  if (call.rounds != 0) {
    if (const Kernel kernel = find_rounding_kernel(name, element)) return kernel;
  }
  for (const Entry& entry : kKernels) {
    if (std::strcmp(entry.name, name) == 0 && element >= 0 && element < kNumElements) {
      return entry.by_element[element];
    }
  }
  return nullptr;
}

// Counts the bytes of tensors and scratch that go from one replica's memory to another's.
class Traffic : public Watcher {
 public:
  // `moved` has a row of `num_replicas` numbers for each replica: what goes from it to others.
  Traffic(const Arguments& call, int num_blocks, long long* moved) : call_(call), moved_(moved) {
    const long long state = static_cast<long long>(call.state_blocks) * kStateBytes;
    workspace_bytes_ = state + num_blocks * call.scratch_bytes;
  }

  void moved(int row, const void* address, int num_bytes, bool is_write) override {
    for (int r = 0; r < call_.num_replicas; ++r) {
      if (!is_in(address, call_.data[r], call_.count * call_.element_bytes) &&
          !is_in(address, call_.workspace[r], workspace_bytes_)) {
        continue;
      }
      const int from = is_write ? row : r, to = is_write ? r : row;
      std::atomic_ref<long long>(moved_[from * call_.num_replicas + to]) += num_bytes;
    }
  }

 private:
  static bool is_in(const void* address, const void* begin, long long num_bytes) {
    const auto offset = static_cast<const char*>(address) - static_cast<const char*>(begin);
    return offset >= 0 && offset < num_bytes;
  }

  const Arguments& call_;
  long long workspace_bytes_;
  long long* moved_;
};

// What the threads of one replica share: a barrier per block, and one between calls.
struct Device {
  Device(int num_blocks, int num_threads) : stream(num_blocks * num_threads) {
    for (int b = 0; b < num_blocks; ++b) {
      blocks.push_back(std::make_unique<BlockBarrier>(num_threads));
    }
  }
  std::vector<std::unique_ptr<BlockBarrier>> blocks;
  std::barrier<> stream;
};

enum Gate : int { kClosed, kOpen, kCancelled };

}  // namespace

extern "C" {

enum MirrorSimulateResult : int { kDone = 0, kNoSuchKernel = 1, kNoThreads = 2 };

int mirror_arguments_bytes() { return sizeof(Arguments); }

// Runs `num_calls` calls, each of a kernel by name and element type, on all replicas that are not
// in the bit mask `absent`, and returns when all have ended. `calls[i].rows` must be the identity:
// every replica is a device. Unless the matrix `moved` is null, the bytes that the first call
// moves between replicas are added to it.
int mirror_simulate(const char* const* names, const int* elements, const Arguments* calls,
                    int num_calls, int num_blocks, int num_threads, unsigned absent,
                    long long* moved) {
  std::vector<Kernel> kernels;
  for (int i = 0; i < num_calls; ++i) {
    kernels.push_back(find_kernel(names[i], elements[i], calls[i]));
    if (kernels.back() == nullptr) return kNoSuchKernel;
  }
  const int num_replicas = calls[0].num_replicas;
  Traffic traffic(calls[0], num_blocks, moved);
  Watcher* const watcher = moved == nullptr ? nullptr : &traffic;
  std::vector<std::unique_ptr<Device>> devices;
  std::vector<Place> places;
  for (int r = 0; r < num_replicas; ++r) {
    if (absent >> r & 1) continue;
    devices.push_back(std::make_unique<Device>(num_blocks, num_threads));
    for (int b = 0; b < num_blocks; ++b) {
      for (int t = 0; t < num_threads; ++t) {
        BlockBarrier* const barrier = devices.back()->blocks[b].get();
        places.push_back({t, num_threads, b, num_blocks, r, barrier, watcher});
      }
    }
  }
  if (places.empty()) return kDone;

  std::atomic<int> gate{kClosed};
  const auto work = [&](const Place& here, Device& device) {
    gate.wait(kClosed);
    if (gate.load() == kCancelled) return;
    place = here;
    for (int i = 0; i < num_calls; ++i) {
      if (i > 0) device.stream.arrive_and_wait();
      kernels[i](calls[i]);
    }
  };
  const std::size_t per_device = static_cast<std::size_t>(num_blocks) * num_threads;
  std::vector<std::thread> threads;
  threads.reserve(places.size());
  int result = kDone;
  try {
    // The caller is a thread of the grid as well.
    for (std::size_t i = 1; i < places.size(); ++i) {
      threads.emplace_back(work, std::cref(places[i]), std::ref(*devices[i / per_device]));
    }
    gate = kOpen;
  } catch (const std::system_error&) {
    gate = kCancelled;
    result = kNoThreads;
  }
  gate.notify_all();
  if (result == kDone) work(places[0], *devices[0]);
  for (std::thread& thread : threads) thread.join();
  return result;
}

// The conversions of half types, for tests: bits of the half type in the low 16 bits.
float mirror_widen(int is_bfloat16, unsigned bits) {
  const auto low = static_cast<unsigned short>(bits);
  return is_bfloat16 ? widen(BFloat16{low}) : widen(Half{low});
}
unsigned mirror_narrow(int is_bfloat16, float x) {
  return is_bfloat16 ? narrow(x, BFloat16{}).bits : narrow(x, Half{}).bits;
}

}  // extern "C"
