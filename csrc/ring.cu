// Collectives around a ring: replica r sends only to replica r + 1.
//
// A block is a channel of its own: it works on the same part of every chunk on all replicas, and
// waits for that block alone on its two neighbours. Two kinds of messages go to the next replica:
//
//   a slot         partial sums, put into one of kSlots places in the *receiver's* scratch. The
//                  sender waits for credit: the receiver counts the slots that it has emptied
//   a landing      finished elements, written straight into the receiver's tensor
//
// All counters run on from call to call and wrap around; only differences matter.
#include "collective.h"

// How many slots a sender may be ahead. A power of two, so that counters may wrap around.
constexpr unsigned kSlots = 4;

struct RingCounters {
  unsigned sent, taken;      // slots: put into the next replica's scratch, taken out of mine
  unsigned written, landed;  // landings: written into the next replica's tensor, seen in mine
  unsigned calls;            // calls that signalled that the tensor is ready to be written
};

// In the workspace of the replica that polls the flags; each has a single writer.
struct RingChannel {
  Flag filled;  // by the previous replica: slots it has put here
  Flag landed;  // by the previous replica: segments it has written into this replica's tensor
  Flag credit;  // by the next replica: slots it has taken out
  Flag opened;  // by the next replica: calls for which its tensor is ready to be written to
  RingCounters counters;
};

// One block of one replica, for the length of a call.
struct RingStation {
  Self self;
  int next, prev;
  RingChannel *mine, *to_next, *to_prev;
  RingCounters counters;
  long long slot_bytes;
  bool are_aligned;  // the tensors that it works on: the own one, and the next replica's
};

DEVICE RingStation ring_station(const Arguments& a) {
  const Self self = self_of(a);
  const int n = a.num_replicas;
  const int next = (self.id + 1) % n, prev = (self.id + n - 1) % n;
  RingChannel* mine = state_of<RingChannel>(a, self.id);
  return {self,
          next,
          prev,
          mine,
          state_of<RingChannel>(a, next),
          state_of<RingChannel>(a, prev),
          mine->counters,
          a.scratch_bytes / kSlots / kPackBytes * kPackBytes,
          is_aligned(a.data[self.id]) && is_aligned(a.data[next])};
}

// What a step waits for before it touches any data, and what it posts when all threads have.
struct RingStep {
  bool take;   // a filled slot; then gives credit for it
  bool put;    // credit; then the slot is filled
  bool land;   // a landing
  bool write;  // nothing; then the landing at the next replica
};

// Acquires what the neighbours published: the contents of a slot, or of the own tensor, and that
// a slot of the next replica is empty again.
DEVICE bool ring_await(const Arguments& a, const RingStation& at, const RingStep& step) {
  bool late = false;
  if (thread_id() == 0) {
    if (step.take) {
      late |= !wait_until(a, at.self, &at.mine->filled, at.counters.taken + 1, at.prev);
    }
#ifndef MIRROR_PLANT_NO_CREDIT
    if (step.put) {
      late |= !wait_until(a, at.self, &at.mine->credit, at.counters.sent + 1 - kSlots, at.next);
    }
#endif
    if (step.land) {
      late |= !wait_until(a, at.self, &at.mine->landed, at.counters.landed + 1, at.prev);
    }
  }
  return !block_any(late);
}

// Publishes what the block wrote to the next replica, and to the previous one that its slot is
// read. All threads count; one of them posts.
DEVICE void ring_publish(RingStation& at, const RingStep& step) {
  publish_barrier();
  at.counters.sent += step.put;
  at.counters.taken += step.take;
  at.counters.written += step.write;
  at.counters.landed += step.land;
  if (thread_id() != 0) return;
  if (step.put) store_release(&at.to_next->filled, at.counters.sent);
  if (step.take) store_release(&at.to_prev->credit, at.counters.taken);
  if (step.write) store_release(&at.to_next->landed, at.counters.written);
}

// Signals to the previous replica that this tensor may be written, and waits for the same signal
// of the next one. Reductions do not need it: a finished chunk has a term from every replica.
DEVICE bool ring_open(const Arguments& a, RingStation& at) {
  at.counters.calls += 1;
  bool late = false;
  if (thread_id() == 0) {
    store_release(&at.to_prev->opened, at.counters.calls);
    late = !wait_until(a, at.self, &at.mine->opened, at.counters.calls, at.next);
  }
  return !block_any(late);
}

// Stores the counters for the next call. The block must have had a barrier since it read them.
DEVICE void ring_leave(const RingStation& at) {
  if (thread_id() == 0) at.mine->counters = at.counters;
}

template <class Slot>
DEVICE Slot* ring_slot(const Arguments& a, const RingStation& at, int replica, unsigned count) {
  return reinterpret_cast<Slot*>(scratch_of(a, replica) + count % kSlots * at.slot_bytes);
}

// How often a thread reads 16 bytes for a pack of a sum: from a slot, and from the own tensor.
template <class T, class K>
constexpr int kRingLoads = kVectors<T, K> + 1;

// Sends the own elements of a segment, as they are, as the first of the sum.
template <class T, class K>
DEVICE bool ring_send(const Arguments& a, RingStation& at, const Range& range) {
  const RingStep step = {.take = false, .put = true, .land = false, .write = false};
  if (!ring_await(a, at, step)) return false;
  const T* own = static_cast<const T*>(a.data[at.self.id]);
  T* out = ring_slot<T>(a, at, at.next, at.counters.sent);
  const long long origin = origin_of<T>(range);
  deal_out<T, in_flight<K>(1)>(range, at.are_aligned, [&](auto here) {
    write(out, here.from(origin), read(own, here));
  });
  ring_publish(at, step);
  return true;
}

// Receives a partial sum, adds the own elements, sends it on: one pass over the segment. What
// comes is Slots: elements from the first replica, partial sums from others.
template <class T, class K, class Slot>
DEVICE bool ring_receive_reduce_send(const Arguments& a, RingStation& at, const Range& range) {
  const RingStep step = {.take = true, .put = true, .land = false, .write = false};
  if (!ring_await(a, at, step)) return false;
  const T* own = static_cast<const T*>(a.data[at.self.id]);
  const Slot* in = ring_slot<Slot>(a, at, at.self.id, at.counters.taken);
  Partial<T, K>* out = ring_slot<Partial<T, K>>(a, at, at.next, at.counters.sent);
  const long long origin = origin_of<T>(range);
  deal_out<T, in_flight<K>(kRingLoads<T, K>)>(range, at.are_aligned, [&](auto here) {
    auto totals = widened(read(in, here.from(origin)));
    combine<K>(a, totals, read(own, here));
    write(out, here.from(origin), partial<T, K>(totals));
  });
  ring_publish(at, step);
  return true;
}

// Receives the last partial sum, adds the own elements, scales, rounds; writes the result here
// and, if it `is_passed_on`, into the next replica's tensor.
template <class T, class K, class Slot>
DEVICE bool ring_finish(const Arguments& a, RingStation& at, const Range& range,
                        bool is_passed_on) {
  const RingStep step = {.take = true, .put = false, .land = false, .write = is_passed_on};
  if (!ring_await(a, at, step)) return false;
  T* own = static_cast<T*>(a.data[at.self.id]);
  T* out = static_cast<T*>(a.data[at.next]);
  const Slot* in = ring_slot<Slot>(a, at, at.self.id, at.counters.taken);
  const long long origin = origin_of<T>(range);
  deal_out<T, in_flight<K>(kRingLoads<T, K>)>(range, at.are_aligned, [&](auto here) {
    auto totals = widened(read(in, here.from(origin)));
    combine<K>(a, totals, read(own, here));
    const auto result = finished<T>(totals, a.scale);
    write(own, here, result);
    if (is_passed_on) write(out, here, result);
  });
  ring_publish(at, step);
  return true;
}

// Waits for a segment to land in the own tensor, if `land`, and writes it on into the next
// replica's, if it `is_passed_on`.
template <class T, class K>
DEVICE bool ring_pass_on(const Arguments& a, RingStation& at, const Range& range, bool land,
                         bool is_passed_on) {
  const RingStep step = {.take = false, .put = false, .land = land, .write = is_passed_on};
  if (!ring_await(a, at, step)) return false;
  const T* own = static_cast<const T*>(a.data[at.self.id]);
  T* out = static_cast<T*>(a.data[at.next]);
  if (is_passed_on) {
    deal_out<T, in_flight<K>(1)>(range, at.are_aligned,
                                 [&](auto here) { write(out, here, read(own, here)); });
  }
  ring_publish(at, step);
  return true;
}

// One replica alone has nothing to send; only the scale is left.
template <class T, class K>
DEVICE void ring_scale(const Arguments& a) {
  const Range range = segment_of<T>({0, a.count}, cut_chunks<T>(a, 1, kWholeChunk), 0);
  T* own = static_cast<T*>(a.data[0]);
  deal_out<T, in_flight<K>(1)>(range, is_aligned(own), [&](auto at) {
    write(own, at, finished<T>(widened(read(own, at)), a.scale));
  });
}

// The segment of chunk `self - back`, around the ring.
template <class T>
DEVICE Range ring_segment(const Arguments& a, const RingStation& at, const Cut& cut, int back,
                          long long s) {
  const int n = a.num_replicas;
  return segment_of<T>(chunk_of<T>(a, (at.self.id + n - back) % n, n), cut, s);
}

// Reduces segment s of all chunks; the sum of chunk c starts at replica c + 1 and ends at c.
//
//   n = 3, a message is src->dst:chunk
//       0->1:2  1->2:0  2->0:1      first terms
//       0->1:1  1->2:2  2->0:0      two terms; replica r adds the third one to chunk r
//
// A first term is an element, and is sent in its bytes. The sums of the next hops do not fit into
// them: two bfloat16 have more than 2^16 different sums, and later terms distinguish them.
template <class T, class K>
DEVICE bool ring_reduce_segment(const Arguments& a, RingStation& at, const Cut& cut, long long s,
                                bool write) {
  if (!ring_send<T, K>(a, at, ring_segment<T>(a, at, cut, 1, s))) return false;
  const int n = a.num_replicas;
  if constexpr (sizeof(Partial<T, K>) == sizeof(T)) {
    for (int back = 2; back < n; ++back) {
      const Range range = ring_segment<T>(a, at, cut, back, s);
      if (!ring_receive_reduce_send<T, K, T>(a, at, range)) return false;
    }
    return ring_finish<T, K, T>(a, at, ring_segment<T>(a, at, cut, 0, s), write);
  } else {
    using Slot = Partial<T, K>;
    const Range own = ring_segment<T>(a, at, cut, 0, s);
    if (n == 2) return ring_finish<T, K, T>(a, at, own, write);
    const Range second = ring_segment<T>(a, at, cut, 2, s);
    if (!ring_receive_reduce_send<T, K, T>(a, at, second)) return false;
    for (int back = 3; back < n; ++back) {
      const Range range = ring_segment<T>(a, at, cut, back, s);
      if (!ring_receive_reduce_send<T, K, Slot>(a, at, range)) return false;
    }
    return ring_finish<T, K, Slot>(a, at, own, write);
  }
}

// Passes on segment s of the other replicas' chunks, as they land; the last one ends here.
template <class T, class K>
DEVICE bool ring_gather_segment(const Arguments& a, RingStation& at, const Cut& cut, long long s) {
  const int n = a.num_replicas;
  for (int back = 1; back < n; ++back) {
    const Range range = ring_segment<T>(a, at, cut, back, s);
    if (!ring_pass_on<T, K>(a, at, range, true, back < n - 1)) return false;
  }
  return true;
}

// Ring all-reduce: reduce-scatter and all-gather, fused, segment by segment.
//
//   traffic       2 (n - 1) / n * bytes written to the next replica; (5n - 4) / n * bytes of
//                 memory per replica. Half types, but where partial sums are rounded: (3n - 4) / n
//                 * bytes written, of first terms 2 an element, of partial sums 4
//   best for      large messages on PCIe, and where not all devices reach each other
//   needs         access to the next replica's memory, and from the previous one
//   determinism   an element is reduced once and copied: outputs have equal bits. The order is
//                 c + 1, c + 2, ..., c for chunk c: it depends on where an element lies
//
// No tensor is written before it was read: a finished segment has a term from every replica.
template <class T, class K>
DEVICE void ring_all_reduce(const Arguments& a) {
  if (a.num_replicas == 1) return ring_scale<T, K>(a);
  RingStation at = ring_station(a);
  const Cut cut = cut_chunks<T>(a, a.num_replicas, at.slot_bytes);
  for (long long s = 0; s < cut.num_segments; ++s) {
    if (!ring_reduce_segment<T, K>(a, at, cut, s, true)) return;
    if (!ring_gather_segment<T, K>(a, at, cut, s)) return;
  }
  ring_leave(at);
}
MIRROR_REDUCTION(ring_all_reduce)

// Ring reduce-scatter: the first half. (n - 1) / n * bytes written to the next replica.
template <class T, class K>
DEVICE void ring_reduce_scatter(const Arguments& a) {
  if (a.num_replicas == 1) return ring_scale<T, K>(a);
  RingStation at = ring_station(a);
  const Cut cut = cut_chunks<T>(a, a.num_replicas, at.slot_bytes);
  for (long long s = 0; s < cut.num_segments; ++s) {
    if (!ring_reduce_segment<T, K>(a, at, cut, s, false)) return;
  }
  ring_leave(at);
}
MIRROR_REDUCTION(ring_reduce_scatter)

// Ring all-gather: the second half, in bytes. (n - 1) / n * bytes written to the next replica.
template <class T, class K>
DEVICE void ring_all_gather(const Arguments& a) {
  if (a.num_replicas == 1) return;
  RingStation at = ring_station(a);
  const Cut cut = cut_chunks<T>(a, a.num_replicas, at.slot_bytes);
  if (!ring_open(a, at)) return;
  for (long long s = 0; s < cut.num_segments; ++s) {
    if (!ring_pass_on<T, K>(a, at, ring_segment<T>(a, at, cut, 0, s), false, true)) return;
    if (!ring_gather_segment<T, K>(a, at, cut, s)) return;
  }
  ring_leave(at);
}
MIRROR_COPY(ring_all_gather)

// Ring broadcast: a chain from the root to the replica before it, in bytes, segment by segment.
// Every replica but the last one writes the whole message once. The link to the root is idle.
template <class T, class K>
DEVICE void ring_broadcast(const Arguments& a) {
  if (a.num_replicas == 1) return;
  RingStation at = ring_station(a);
  const Cut cut = cut_chunks<T>(a, 1, at.slot_bytes);
  const Range all = chunk_of<T>(a, 0, 1);
  if (!ring_open(a, at)) return;
  for (long long s = 0; s < cut.num_segments; ++s) {
    const Range range = segment_of<T>(all, cut, s);
    if (!ring_pass_on<T, K>(a, at, range, at.self.id != a.root, at.next != a.root)) return;
  }
  ring_leave(at);
}
MIRROR_COPY(ring_broadcast)
