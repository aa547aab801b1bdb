// Collectives by direct access: every replica reads and writes the tensors of all other replicas.
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
template <class T, class K>
DEVICE void direct_one_shot(const Arguments& a) {
  const Self self = self_of(a);
  Mailbox* mail = state_of<Mailbox>(a, self.id);
  const unsigned epoch = mail->epoch + kDirectEpochs;
  const long long half = epoch / kDirectEpochs % 2 * (a.scratch_bytes / 2);
  const Range range = segment_of<T>({0, a.count}, cut_chunks<T>(a, 1, kWholeChunk), 0);
  const long long origin = origin_of<T>(range);
  T* own = static_cast<T*>(a.data[self.id]);
  const auto staged_by = [&](int r) { return reinterpret_cast<T*>(scratch_of(a, r) + half); };
  deal_out<T, in_flight<K>(1)>(range, is_aligned(own), [&](auto at) {
    write(staged_by(self.id), at.from(origin), read(own, at));
  });
  if (!meet_all(a, self, epoch)) return;
  deal_out<T, in_flight<K>(K::kMostReplicas)>(range, is_aligned(own), [&](auto at) {
    const auto totals = read_combined<T, K, K::kMostReplicas>(a, K::replicas(a), at.from(origin),
                                                              staged_by);
    write(own, at, finished<T>(totals, a.scale));
  });
  leave(mail, epoch);
}
MIRROR_REDUCTION(direct_one_shot)

// Where a replica writes its result: into every tensor, or only into its own.
enum class To { kAll, kSelf };

// Reduces chunk `self` in replica order. No other replica reads or writes that chunk, in any
// tensor, so the same thread reads each pack everywhere and then writes it everywhere, in place.
//
// The first meeting publishes that all tensors are ready; the last one, that all reads and writes
// are done.
template <class T, class K, To kTo>
DEVICE void direct_reduce_chunk(const Arguments& a) {
  const Self self = self_of(a);
  Mailbox* mail = state_of<Mailbox>(a, self.id);
  const unsigned epoch = mail->epoch;
#ifndef MIRROR_PLANT_NO_CREDIT
  if (!meet_all(a, self, epoch + 1)) return;
#endif
  const Range chunk = chunk_of<T>(a, self.id, a.num_replicas);
  const Range range = segment_of<T>(chunk, cut_chunks<T>(a, a.num_replicas, kWholeChunk), 0);
  const auto tensor_of = [&](int r) { return static_cast<T*>(a.data[r]); };
  deal_out<T, in_flight<K>(K::kMostReplicas)>(range, are_aligned(a), [&](auto at) {
    const int n = K::replicas(a);
    const auto totals = read_combined<T, K, K::kMostReplicas>(a, n, at, tensor_of);
    const auto result = finished<T>(totals, a.scale);
    if constexpr (kTo == To::kSelf) {
      write(tensor_of(self.id), at, result);
    } else {
      UNROLL_KNOWN
      for (int r = 0; r < n; ++r) write(tensor_of(r), at, result);
    }
  });
  if (!meet_all(a, self, epoch + kDirectEpochs)) return;
  leave(mail, epoch + kDirectEpochs);
}

// Two-shot all-reduce: replica i reduces chunk i and writes it into all tensors.
//
//   traffic       (n - 1) / n * bytes read from peers per replica, and as many written to them
//   best for      large messages if all devices can access each other
//   needs         peer access, nothing else: no scratch
//   determinism   tensors are combined in replica order, once, and copied
template <class T, class K>
DEVICE void direct_two_shot(const Arguments& a) {
  direct_reduce_chunk<T, K, To::kAll>(a);
}
MIRROR_REDUCTION(direct_two_shot)

// Reduce-scatter: the first half of two-shot. (n - 1) / n * bytes read from peers per replica.
template <class T, class K>
DEVICE void direct_reduce_scatter(const Arguments& a) {
  direct_reduce_chunk<T, K, To::kSelf>(a);
}
MIRROR_REDUCTION(direct_reduce_scatter)

// Replica i copies chunk i, as bytes, from one tensor into all others.
template <class K>
DEVICE void direct_copy_chunk(const Arguments& a, const Self& self, int from) {
  using Byte = unsigned char;
  Mailbox* mail = state_of<Mailbox>(a, self.id);
  const unsigned epoch = mail->epoch;
#ifndef MIRROR_PLANT_NO_CREDIT
  if (!meet_all(a, self, epoch + 1)) return;
#endif
  const Range chunk = chunk_of<Byte>(a, self.id, a.num_replicas);
  const Range range = segment_of<Byte>(chunk, cut_chunks<Byte>(a, a.num_replicas, kWholeChunk), 0);
  deal_out<Byte, in_flight<K>(1)>(range, are_aligned(a), [&](auto at) {
    const auto bytes = read(static_cast<const Byte*>(a.data[from]), at);
    for (int r = 0; r < a.num_replicas; ++r) {
      if (r != from) write(static_cast<Byte*>(a.data[r]), at, bytes);
    }
  });
  if (!meet_all(a, self, epoch + kDirectEpochs)) return;
  leave(mail, epoch + kDirectEpochs);
}

// All-gather: (n - 1) / n * bytes written to peers per replica.
template <class T, class K>
DEVICE void direct_all_gather(const Arguments& a) {
  const Self self = self_of(a);
  direct_copy_chunk<K>(a, self, self.id);
}
MIRROR_COPY(direct_all_gather)

// Broadcast: replica i reads chunk i from the root and writes it to the others, so that the root's
// link carries each byte about once, and not n - 1 times.
template <class T, class K>
DEVICE void direct_broadcast(const Arguments& a) {
  direct_copy_chunk<K>(a, self_of(a), a.root);
}
MIRROR_COPY(direct_broadcast)
