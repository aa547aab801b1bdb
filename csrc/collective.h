// What the three algorithms share: arguments, workspaces, waiting, and packs of 16 bytes.
//
//   workspace      one per replica: a state of kStateBytes per block, then scratch per block.
//                  Zeroed once. Counters in it only grow, and are compared by signed difference
//   chunk i of n   as torch.tensor_split cuts a flat tensor; replica i finishes it
//   packs          number p covers the elements from p * kLanes<T> on, whatever the chunk. So
//                  chunks may begin anywhere, and a pack that two chunks share is written by
//                  elements
#pragma once

#include "portable.h"

constexpr int kMaxReplicas = 16;
constexpr int kPackBytes = 16;
// What one block keeps in a replica's workspace: flags of 128 bytes each, and counters.
constexpr int kStateBytes = 4096;
// 512 threads with up to 128 registers each: one block always fits on a multiprocessor, so a grid
// of at most as many blocks as there are multiprocessors is resident as a whole.
constexpr int kMaxThreads = 512;

// The arguments of every kernel; mirror/comm/kernels/kernels.py has the same structure.
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
  int element_bytes;           // for kernels that only copy, and see bytes
  int state_blocks;            // blocks for which the workspaces have room
  int island_size;             // replicas per island
  int call;                    // number of the call, for error words
  int rows[kMaxReplicas];      // the replica that row i of this launch's grid stands for
  int order[kMaxReplicas];     // the replicas sorted by island
  int position[kMaxReplicas];  // of each replica in `order`
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
// False at the deadline; then the replica's error word says in which call, and whom it waited for.
// A replica whose error word is set waits no more: what it still has to run ends soon.
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

// Flags for kernels in which any replica may tell any other how far it is.
//
// Each flag has one writer, and counts its progress. `epoch` is where a call starts counting; all
// replicas leave a call with the same one.
struct Mailbox {
  Flag from[kMaxReplicas];
  unsigned epoch;
};

// Ends a call: the next one starts counting here. The block must have met since it read the epoch.
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

// How a chunk is cut: every block has the same number of packs of it, and works on them in
// segments. All replicas cut alike, whichever chunk it is, so that they count the same messages.
struct Cut {
  long long packs_per_block, packs_per_segment, num_segments;
};

// For kernels that stage nothing: a block's part of a chunk is one segment.
inline constexpr long long kWholeChunk = 1ll << 60;

template <class T>
DEVICE Cut cut_chunks(const Arguments& a, int n, long long segment_bytes) {
  const long long longest = (a.count + n - 1) / n * (sizeof(T) == 1 ? a.element_bytes : 1);
  // A chunk of one pack's length touches two if it begins inside of one.
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

// The packs that a range touches, dealt out to the threads of the block:
// for (p = first_pack<T>(range) + thread_id(); p < last_pack<T>(range); p += num_threads()).
template <class T>
DEVICE long long first_pack(const Range& range) {
  return range.begin / kLanes<T>;
}
template <class T>
DEVICE long long last_pack(const Range& range) {
  return range.begin == range.end ? first_pack<T>(range) : (range.end + kLanes<T> - 1) / kLanes<T>;
}

// One pack of T in registers, in the type that it is summed in.
template <class T>
struct Pack {
  Total<T> lane[kLanes<T>];
};

template <class T>
union PackBits {
  Vector16 vector;
  T lane[kLanes<T>];
};

// Whether pack p of a tensor can be moved as 16 bytes: it is whole, and aligned.
template <class T>
DEVICE bool is_whole(const T* tensor, long long p, const Range& range) {
  return p * kLanes<T> >= range.begin && (p + 1) * kLanes<T> <= range.end &&
         address_of(tensor) % kPackBytes == 0;
}

// Reads those elements of pack p that are in the range.
template <class T>
DEVICE PackBits<T> read_bits(const T* tensor, long long p, const Range& range) {
  PackBits<T> bits;
  const long long first = p * kLanes<T>;
  if (is_whole(tensor, p, range)) {
    bits.vector = *reinterpret_cast<const Vector16*>(tensor + first);
    return bits;
  }
  bits.vector = Vector16{};
  UNROLL
  for (int i = 0; i < kLanes<T>; ++i) {
    if (first + i >= range.begin && first + i < range.end) bits.lane[i] = tensor[first + i];
  }
  return bits;
}

// Writes those elements of pack p that are in the range.
template <class T>
DEVICE void write_bits(T* tensor, long long p, const Range& range, const PackBits<T>& bits) {
  const long long first = p * kLanes<T>;
  if (is_whole(tensor, p, range)) {
    *reinterpret_cast<Vector16*>(tensor + first) = bits.vector;
    return;
  }
  UNROLL
  for (int i = 0; i < kLanes<T>; ++i) {
    if (first + i >= range.begin && first + i < range.end) tensor[first + i] = bits.lane[i];
  }
}

template <class T>
DEVICE Pack<T> widened(const PackBits<T>& bits) {
  Pack<T> pack;
  UNROLL
  for (int i = 0; i < kLanes<T>; ++i) pack.lane[i] = widened(bits.lane[i]);
  return pack;
}

template <class T>
DEVICE Pack<T> read_pack(const T* tensor, long long p, const Range& range) {
  return widened<T>(read_bits(tensor, p, range));
}

// Scales, rounds once if T is a half type; the result is ready to be written, anywhere.
template <class T>
DEVICE PackBits<T> finished(const Pack<T>& pack, double scale) {
  PackBits<T> bits;
  UNROLL
  for (int i = 0; i < kLanes<T>; ++i) bits.lane[i] = finished<T>(pack.lane[i], scale);
  return bits;
}

// left = left op right.
template <class T>
DEVICE void combine(int op, Pack<T>& left, const Pack<T>& right) {
  UNROLL
  for (int i = 0; i < kLanes<T>; ++i) {
    left.lane[i] = combined<T>(op, left.lane[i], right.lane[i]);
  }
}

// Scratch holds packs of totals, one after the other, aligned: half types travel as float32.
template <class T>
constexpr int kVectors = static_cast<int>(sizeof(Total<T>) / sizeof(T));

template <class T>
union TotalBits {
  Vector16 vector[kVectors<T>];
  Total<T> lane[kLanes<T>];
};

template <class T>
DEVICE Pack<T> read_total(const char* scratch, long long i) {
  const Vector16* from = reinterpret_cast<const Vector16*>(scratch) + i * kVectors<T>;
  TotalBits<T> bits;
  Pack<T> pack;
  UNROLL
  for (int v = 0; v < kVectors<T>; ++v) bits.vector[v] = from[v];
  UNROLL
  for (int j = 0; j < kLanes<T>; ++j) pack.lane[j] = bits.lane[j];
  return pack;
}

template <class T>
DEVICE void write_total(char* scratch, long long i, const Pack<T>& pack) {
  Vector16* to = reinterpret_cast<Vector16*>(scratch) + i * kVectors<T>;
  TotalBits<T> bits;
  UNROLL
  for (int j = 0; j < kLanes<T>; ++j) bits.lane[j] = pack.lane[j];
  UNROLL
  for (int v = 0; v < kVectors<T>; ++v) to[v] = bits.vector[v];
}

// The kernel of a template, under a name without mangling. Reductions are compiled for the element
// type that the compiler was given (-DMIRROR_ELEMENT=BFloat16); copies, which see bytes, are a unit
// of their own (-DMIRROR_COPIES), so that no element type compiles them again. simulate.cpp takes
// the templates themselves.
#define MIRROR_KERNEL_OF(name, Element)                            \
  extern "C" __global__ void __launch_bounds__(kMaxThreads, 1)     \
      name##_kernel(const __grid_constant__ Arguments arguments) { \
    name<Element>(arguments);                                      \
  }
#ifdef MIRROR_ELEMENT
#define MIRROR_REDUCTION(name) MIRROR_KERNEL_OF(name, MIRROR_ELEMENT)
#else
#define MIRROR_REDUCTION(name)
#endif
#ifdef MIRROR_COPIES
#define MIRROR_COPY(name) MIRROR_KERNEL_OF(name, unsigned char)
#else
#define MIRROR_COPY(name)
#endif
