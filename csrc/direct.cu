// Collectives by direct access: every replica reads from and writes to all the others' tensors.
#include "collective.h"

// Two meetings at most, and one number per call even for kernels with a single one.
constexpr unsigned kDirectEpochs = 2;

// All replicas, in any order: the group that meets.
DEVICE bool meet_all(const Arguments& a, const Self& self, unsigned epoch) {
  return meet(a, self, epoch, 0, 1, a.num_replicas);
}

// One-shot all-reduce: every replica copies its tensor into its scratch, then reduces all of them.
//
//   traffic       (n - 1) * bytes read from peers per replica, nothing written to them
//   best for      small messages: one meeting, where two-shot has two
//   needs         peer access; a block's part of the tensor fits into half of its scratch
//   determinism   tensors are combined in replica order everywhere: outputs have equal bits
//
// The halves of the scratch take turns by call. A half is written again two calls later; in
// between, the meeting of the next call showed that all replicas had ended this one.
template <class T>
DEVICE void direct_one_shot(const Arguments& a) {
  const Self self = self_of(a);
  Mailbox* mail = state_of<Mailbox>(a, self.id);
  const unsigned epoch = mail->epoch + kDirectEpochs;
  const long long half = epoch / kDirectEpochs % 2 * (a.scratch_bytes / 2);
  const Range range = segment_of<T>({0, a.count}, cut_chunks<T>(a, 1, kWholeChunk), 0);
  T* own = static_cast<T*>(a.data[self.id]);
  const long long first = first_pack<T>(range), last = last_pack<T>(range);

  const auto staged_by = [&](int r) { return reinterpret_cast<T*>(scratch_of(a, r) + half); };
  const Range whole = {0, (last - first) * kLanes<T>};
  for (long long p = first + thread_id(); p < last; p += num_threads()) {
    write_bits(staged_by(self.id), p - first, whole, read_bits(own, p, range));
  }
  if (!meet_all(a, self, epoch)) return;
  for (long long p = first + thread_id(); p < last; p += num_threads()) {
    Pack<T> total = read_pack<T>(staged_by(0), p - first, whole);
    for (int r = 1; r < a.num_replicas; ++r) {
      combine<T>(a.op, total, read_pack<T>(staged_by(r), p - first, whole));
    }
    write_bits(own, p, range, finished<T>(total, a.scale));
  }
  leave(mail, epoch);
}
MIRROR_REDUCTION(direct_one_shot)

// Where a replica puts what it has made: into every tensor, or into its own alone.
enum class To { kAll, kSelf };

// Reduces chunk `self` in replica order. Nobody else reads or writes that chunk, in any tensor,
// so each pack is read everywhere and then written everywhere by the same thread, in place.
//
// The first meeting publishes that all tensors are ready; the last one, that all reads and writes
// are done.
template <class T, To kTo>
DEVICE void direct_reduce_chunk(const Arguments& a) {
  const Self self = self_of(a);
  Mailbox* mail = state_of<Mailbox>(a, self.id);
  const unsigned epoch = mail->epoch;
#ifndef MIRROR_PLANT_NO_CREDIT
  if (!meet_all(a, self, epoch + 1)) return;
#endif
  const Range chunk = chunk_of<T>(a, self.id, a.num_replicas);
  const Range range = segment_of<T>(chunk, cut_chunks<T>(a, a.num_replicas, kWholeChunk), 0);
  for (long long p = first_pack<T>(range) + thread_id(); p < last_pack<T>(range);
       p += num_threads()) {
    Pack<T> total = read_pack(static_cast<const T*>(a.data[0]), p, range);
    for (int r = 1; r < a.num_replicas; ++r) {
      combine<T>(a.op, total, read_pack(static_cast<const T*>(a.data[r]), p, range));
    }
    const PackBits<T> bits = finished<T>(total, a.scale);
    if constexpr (kTo == To::kSelf) {
      write_bits(static_cast<T*>(a.data[self.id]), p, range, bits);
    } else {
      for (int r = 0; r < a.num_replicas; ++r) {
        write_bits(static_cast<T*>(a.data[r]), p, range, bits);
      }
    }
  }
  if (!meet_all(a, self, epoch + kDirectEpochs)) return;
  leave(mail, epoch + kDirectEpochs);
}

// Two-shot all-reduce: replica i reduces chunk i and writes it into all tensors.
//
//   traffic       (n - 1) / n * bytes read from peers per replica, and as many written to them
//   best for      large messages wherever all devices reach each other
//   needs         peer access, nothing else: no scratch
//   determinism   tensors are combined in replica order, once, and copied
template <class T>
DEVICE void direct_two_shot(const Arguments& a) {
  direct_reduce_chunk<T, To::kAll>(a);
}
MIRROR_REDUCTION(direct_two_shot)

// Reduce-scatter: the first half of two-shot. (n - 1) / n * bytes read from peers per replica.
template <class T>
DEVICE void direct_reduce_scatter(const Arguments& a) {
  direct_reduce_chunk<T, To::kSelf>(a);
}
MIRROR_REDUCTION(direct_reduce_scatter)

// Replica i copies chunk i from one tensor into all others; in bytes, whatever the elements.
DEVICE void direct_copy_chunk(const Arguments& a, const Self& self, int from) {
  using Byte = unsigned char;
  Mailbox* mail = state_of<Mailbox>(a, self.id);
  const unsigned epoch = mail->epoch;
#ifndef MIRROR_PLANT_NO_CREDIT
  if (!meet_all(a, self, epoch + 1)) return;
#endif
  const Range chunk = chunk_of<Byte>(a, self.id, a.num_replicas);
  const Range range = segment_of<Byte>(chunk, cut_chunks<Byte>(a, a.num_replicas, kWholeChunk), 0);
  for (long long p = first_pack<Byte>(range) + thread_id(); p < last_pack<Byte>(range);
       p += num_threads()) {
    const auto bits = read_bits(static_cast<const Byte*>(a.data[from]), p, range);
    for (int r = 0; r < a.num_replicas; ++r) {
      if (r != from) write_bits(static_cast<Byte*>(a.data[r]), p, range, bits);
    }
  }
  if (!meet_all(a, self, epoch + kDirectEpochs)) return;
  leave(mail, epoch + kDirectEpochs);
}

// All-gather: (n - 1) / n * bytes written to peers per replica.
template <class T>
DEVICE void direct_all_gather(const Arguments& a) {
  const Self self = self_of(a);
  direct_copy_chunk(a, self, self.id);
}
MIRROR_COPY(direct_all_gather)

// Broadcast: replica i reads chunk i from the root and writes it to the others, so that the root's
// link carries each byte about once, and not n - 1 times.
template <class T>
DEVICE void direct_broadcast(const Arguments& a) {
  direct_copy_chunk(a, self_of(a), a.root);
}
MIRROR_COPY(direct_broadcast)
