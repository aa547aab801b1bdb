// One kernel source for three compilers: NVRTC, nvcc, and g++ (C++20) for simulated devices.
//
//   threads        kernels ask thread_id(), num_threads(), block_id(), num_blocks(), device_row()
//   on the CPU     one OS thread per CUDA thread, std::barrier for __syncthreads
//   flags          release stores and acquire loads at system scope; the only way that replicas
//                  synchronise. No fences: ThreadSanitizer does not model them
//   packs          16 bytes of a tensor, which a thread moves at once
//
// The macros MIRROR_PLANT_... plant one bug each; tests/comm/kernels/test_races.py requires that the
// race detector finds every one of them. No build sets them otherwise.
#pragma once

#ifdef __CUDACC__
#define DEVICE __device__ __forceinline__
#define UNROLL _Pragma("unroll")
#define UNROLL_KNOWN _Pragma("unroll")
#else
#include <atomic>
#include <barrier>
#include <chrono>
#include <thread>
#define DEVICE inline
#define UNROLL _Pragma("GCC unroll 16")
// For loops over replicas: simulated devices know their number only at run time, so g++ decides.
#define UNROLL_KNOWN
#endif

// 16 bytes of any content, which are read and written at once.
#ifdef __CUDACC__
using Vector16 = uint4;
#else
using Vector16 [[gnu::vector_size(16), gnu::may_alias]] = unsigned long long;
#endif

DEVICE unsigned long long address_of(const void* pointer) {
  return reinterpret_cast<unsigned long long>(pointer);
}

// A line of its own for every flag: writers on other devices do not disturb each other.
struct alignas(128) Flag {
  unsigned value;
};

// ---------------------------------------------------------------- threads, barriers, clock, flags

#ifdef __CUDACC__

DEVICE int thread_id() { return static_cast<int>(threadIdx.x); }
DEVICE int num_threads() { return static_cast<int>(blockDim.x); }
DEVICE int block_id() { return static_cast<int>(blockIdx.x); }
DEVICE int num_blocks() { return static_cast<int>(gridDim.x); }
DEVICE int device_row() { return static_cast<int>(blockIdx.y); }

DEVICE void block_barrier() { __syncthreads(); }
DEVICE bool block_any(bool mine) { return __syncthreads_or(mine) != 0; }

DEVICE void store_release(Flag* flag, unsigned value) {
  asm volatile("st.release.sys.u32 [%0], %1;" ::"l"(&flag->value), "r"(value) : "memory");
}

DEVICE unsigned load_acquire(const Flag* flag) {
  unsigned value;
  asm volatile("ld.acquire.sys.u32 %0, [%1];" : "=r"(value) : "l"(&flag->value) : "memory");
  return value;
}

DEVICE long long now_ns() {
  long long time;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(time));
  return time;
}

DEVICE void relax() {}

DEVICE void tell_moved(const void*, int, bool) {}

#else

// Lets the threads of a block wait for each other, and agree on whether any of them says yes.
class BlockBarrier {
 public:
  explicit BlockBarrier(int num_threads) : barrier_(num_threads, Agree{this}) {}

  bool any(bool mine) {
    if (mine) pending_.store(true, std::memory_order_relaxed);
    barrier_.arrive_and_wait();
    return agreed_;
  }

 private:
  // Runs between the last arrival and the first departure, so that no thread reads the answer
  // while it is written.
  struct Agree {
    BlockBarrier* self;
    void operator()() noexcept {
      self->agreed_ = self->pending_.exchange(false, std::memory_order_relaxed);
    }
  };
  std::atomic<bool> pending_{false};
  bool agreed_ = false;
  std::barrier<Agree> barrier_;
};

// Receives all reads and writes of tensors and scratch, to count bytes.
struct Watcher {
  virtual void moved(int row, const void* address, int num_bytes, bool is_write) = 0;

 protected:
  ~Watcher() = default;
};

// The position of an OS thread in the grid.
struct Place {
  int thread, num_threads, block, num_blocks, row;
  BlockBarrier* barrier;
  Watcher* watcher;  // nullptr: no counting
};
inline thread_local Place place;

DEVICE int thread_id() { return place.thread; }
DEVICE int num_threads() { return place.num_threads; }
DEVICE int block_id() { return place.block; }
DEVICE int num_blocks() { return place.num_blocks; }
DEVICE int device_row() { return place.row; }

DEVICE void tell_moved(const void* address, int num_bytes, bool is_write) {
  if (place.watcher == nullptr) return;
  place.watcher->moved(place.row, address, num_bytes, is_write);
}

DEVICE void block_barrier() { place.barrier->any(false); }
DEVICE bool block_any(bool mine) { return place.barrier->any(mine); }

#ifdef MIRROR_PLANT_WEAK_RELEASE
constexpr auto kRelease = std::memory_order_relaxed;
#else
constexpr auto kRelease = std::memory_order_release;
#endif
#ifdef MIRROR_PLANT_WEAK_ACQUIRE
constexpr auto kAcquire = std::memory_order_relaxed;
#else
constexpr auto kAcquire = std::memory_order_acquire;
#endif

DEVICE void store_release(Flag* flag, unsigned value) {
  std::atomic_ref<unsigned>(flag->value).store(value, kRelease);
}

DEVICE unsigned load_acquire(const Flag* flag) {
  return std::atomic_ref<unsigned>(const_cast<Flag*>(flag)->value).load(kAcquire);
}

DEVICE long long now_ns() {
  using namespace std::chrono;
  return duration_cast<nanoseconds>(steady_clock::now().time_since_epoch()).count();
}

// Simulated devices have more threads than cores: a spinning thread must let other threads run.
DEVICE void relax() { std::this_thread::yield(); }

#endif

// Orders all that the block wrote before what one of its threads posts after it.
DEVICE void publish_barrier() {
#ifndef MIRROR_PLANT_NO_BARRIER
  block_barrier();
#endif
}

// ---------------------------------------------------------------- element types

struct Half {
  unsigned short bits;
};
struct BFloat16 {
  unsigned short bits;
};

template <class To, class From>
DEVICE To bits_to(From from) {
  static_assert(sizeof(To) == sizeof(From), "a cast of bits keeps their number");
  union {
    From from;
    To to;
  } both = {from};
  return both.to;
}

DEVICE float widen(BFloat16 x) { return bits_to<float>(static_cast<unsigned>(x.bits) << 16); }

// Rounds to nearest even with integers alone: sm_75 has no instruction for it.
DEVICE BFloat16 narrow(float x, BFloat16) {
  const unsigned bits = bits_to<unsigned>(x);
  if (x != x) return {static_cast<unsigned short>((bits >> 16) | 0x40)};
  return {static_cast<unsigned short>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};
}

#ifdef __CUDACC__
DEVICE float widen(Half x) {
  float wide;
  asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(x.bits));
  return wide;
}
DEVICE Half narrow(float x, Half) {
  Half half;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half.bits) : "f"(x));
  return half;
}
#else
// Multiplying by 2^112 moves the exponent from float16's bias, 15, to float32's, 127; it is exact,
// for subnormal numbers as well.
DEVICE float widen(Half x) {
  const unsigned magnitude = x.bits & 0x7fffu;
  const unsigned sign = static_cast<unsigned>(x.bits & 0x8000u) << 16;
  if (magnitude >= 0x7c00u) return bits_to<float>(sign | 0x7f800000u | (magnitude << 13));
  return bits_to<float>(sign | bits_to<unsigned>(bits_to<float>(magnitude << 13) * 0x1p112f));
}
DEVICE Half narrow(float x, Half) {
  const unsigned bits = bits_to<unsigned>(x);
  const unsigned magnitude = bits & 0x7fffffffu;
  const auto sign = static_cast<unsigned short>((bits >> 16) & 0x8000u);
  unsigned rounded;
  if (magnitude > 0x7f800000u) {
    rounded = 0x7e00u;  // NaN
  } else if (magnitude >= 0x477ff000u) {
    rounded = 0x7c00u;  // halfway from the largest float16, 65504, to 65536, and up: infinity
  } else if (magnitude < 0x38800000u) {
    // Below 2^-14. In [0.5, 1) the last bit of a float32 is worth 2^-24, as all of float16's are
    // down here: the addition rounds.
    rounded = bits_to<unsigned>(bits_to<float>(magnitude) + 0.5f) - 0x3f000000u;
  } else {
    rounded = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  }
  return {static_cast<unsigned short>(sign | rounded)};
}
#endif

// Total: what sums are kept in. Wrapping: what + and * are done in, so that integers wrap around.
template <class T>
struct Numbers {
  using Total = T;
  using Wrapping = T;
};
template <>
struct Numbers<int> {
  using Total = int;
  using Wrapping = unsigned;
};
template <>
struct Numbers<long long> {
  using Total = long long;
  using Wrapping = unsigned long long;
};
template <>
struct Numbers<Half> {
  using Total = float;
  using Wrapping = float;
};
template <>
struct Numbers<BFloat16> {
  using Total = float;
  using Wrapping = float;
};
template <class T>
using Total = typename Numbers<T>::Total;

template <class T>
constexpr bool kIsHalf = sizeof(T) == 2;
template <class T>
constexpr bool kIsFloating = static_cast<Total<T>>(0.5) != 0;

template <class T>
DEVICE Total<T> widened(T x) {
  if constexpr (kIsHalf<T>) {
    return widen(x);
  } else {
    return x;
  }
}

template <class T>
DEVICE T narrowed(Total<T> x) {
  if constexpr (kIsHalf<T>) {
    return narrow(x, T{});
  } else {
    return x;
  }
}

enum Op : int { kSum, kMin, kMax, kProd };

// A NaN on either side stays a NaN. If `op` is a constant, the compiler removes the switch.
template <class T>
DEVICE Total<T> combined(int op, Total<T> a, Total<T> b) {
  using W = typename Numbers<T>::Wrapping;
  switch (op) {
    case kSum: return static_cast<Total<T>>(static_cast<W>(a) + static_cast<W>(b));
    case kProd: return static_cast<Total<T>>(static_cast<W>(a) * static_cast<W>(b));
    case kMin: return b < a || b != b ? b : a;
    default: return a < b || b != b ? b : a;
  }
}

template <class T>
DEVICE T finished(Total<T> total, double scale) {
  if constexpr (kIsFloating<T>) total *= static_cast<Total<T>>(scale);
  return narrowed<T>(total);
}
