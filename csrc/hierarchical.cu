// Collectives in two levels: islands of replicas with fast links, slow links between islands.
//
// Replica (i, m) is member m of island i; a.order has it at position i * g + m. Its counterparts
// are the members m of the other islands, and only counterparts exchange between islands. The
// carriers of chunk c, which replica (i, m) finishes, are all replicas (j, m): each handles it in
// its own island. So every replica uses its own slow link, for 1 / g of the bytes.
#include "collective.h"

// One block of one replica, for the length of a call.
struct IslandStation {
  Self self;
  Mailbox* mail;
  unsigned epoch;
  int g, k;            // members per island, islands
  int island, member;  // of this replica
  bool are_aligned;    // the tensors of all replicas
};

template <class K>
DEVICE IslandStation island_station(const Arguments& a) {
  const Self self = self_of(a);
  Mailbox* mail = state_of<Mailbox>(a, self.id);
  const int g = K::members(a), position = a.position[self.id];
  return {self,         mail,         mail->epoch,    g, K::islands(a),
          position / g, position % g, are_aligned(a)};
}

// The replica at this station's place in an island.
DEVICE int carrier_in(const Arguments& a, const IslandStation& at, int island) {
  return a.order[island * at.g + at.member];
}

// Synchronizes the own island: its tensors are ready, or all accesses to them are done.
DEVICE bool meet_island(const Arguments& a, const IslandStation& at, unsigned epoch) {
  return meet(a, at.self, epoch, at.island * at.g, 1, at.g);
}

// Synchronizes the counterparts: data written to them may be read, and their data overwritten.
DEVICE bool meet_counterparts(const Arguments& a, const IslandStation& at, unsigned epoch) {
  return meet(a, at.self, epoch, at.member, at.g, at.k);
}

// A segment of partial sums from island `from`, in the scratch of a carrier.
template <class T, class K>
DEVICE Partial<T, K>* partial_slot(const Arguments& a, const IslandStation& at, int replica,
                                   int from) {
  const long long slot_bytes = a.scratch_bytes / at.k / kPackBytes * kPackBytes;
  return reinterpret_cast<Partial<T, K>*>(scratch_of(a, replica) + from * slot_bytes);
}

template <class T>
DEVICE Cut island_cut(const Arguments& a, const IslandStation& at) {
  return cut_chunks<T>(a, a.num_replicas, a.scratch_bytes / at.k / kPackBytes * kPackBytes);
}

template <class T>
DEVICE Range island_segment(const Arguments& a, int chunk, const Cut& cut, long long s) {
  return segment_of<T>(chunk_of<T>(a, chunk, a.num_replicas), cut, s);
}

// Copies a range of one tensor into those of a group; see `meet` for how a group is given.
template <class T, class K>
DEVICE void copy_to_group(const Arguments& a, const IslandStation& at, int from,
                          const Range& range, int group, int stride, int size) {
  const T* in = static_cast<const T*>(a.data[from]);
  deal_out<T, in_flight<K>(1)>(range, at.are_aligned, [&](auto here) {
    const auto elements = read(in, here);
    for (int i = 0; i < size; ++i) {
      const int to = a.order[group + i * stride];
      if (to != from) write(static_cast<T*>(a.data[to]), here, elements);
    }
  });
}

template <class T, class K>
DEVICE void copy_to_island(const Arguments& a, const IslandStation& at, int from,
                           const Range& range) {
  copy_to_group<T, K>(a, at, from, range, at.island * at.g, 1, at.g);
}

// Reduces one segment inside the own island, once for each island that has a chunk of it, and
// puts the partial sums into the scratch of the replica that finishes the chunk.
template <class T, class K>
DEVICE void reduce_inside(const Arguments& a, const IslandStation& at, const Cut& cut,
                          long long s) {
  for (int i = 0; i < at.k; ++i) {
    const int owner = carrier_in(a, at, i);
    const Range range = island_segment<T>(a, owner, cut, s);
    const long long origin = origin_of<T>(range);
    const auto tensor_of = [&](int m) {
      return static_cast<const T*>(a.data[a.order[at.island * at.g + m]]);
    };
    Partial<T, K>* out = partial_slot<T, K>(a, at, owner, at.island);
    deal_out<T, in_flight<K>(K::kMostMembers)>(range, at.are_aligned, [&](auto here) {
      const auto totals = read_combined<T, K, K::kMostMembers>(a, K::members(a), here, tensor_of);
      write(out, here.from(origin), partial<T, K>(totals));
    });
  }
}

// Adds up the islands' partial sums of the own chunk, in island order, and writes the result into
// the own tensor; if `everywhere`, into those of the whole island and of the counterparts, too.
template <class T, class K>
DEVICE void reduce_between(const Arguments& a, const IslandStation& at, const Cut& cut,
                           long long s, bool everywhere) {
  const Range range = island_segment<T>(a, at.self.id, cut, s);
  const long long origin = origin_of<T>(range);
  const auto slot_of = [&](int i) { return partial_slot<T, K>(a, at, at.self.id, i); };
  constexpr int kLoads = K::kMostIslands * kVectors<T, K>;
  deal_out<T, in_flight<K>(kLoads)>(range, at.are_aligned, [&](auto here) {
    const auto totals = read_combined<Partial<T, K>, K, K::kMostIslands>(
        a, K::islands(a), here.from(origin), slot_of);
    const auto result = finished<T>(totals, a.scale);
    write(static_cast<T*>(a.data[at.self.id]), here, result);
    if (!everywhere) return;
    for (int r = 0; r < a.num_replicas; ++r) {
      const bool is_member = a.position[r] / at.g == at.island;
      const bool is_counterpart = a.position[r] % at.g == at.member;
      if (r == at.self.id || !(is_member || is_counterpart)) continue;
      write(static_cast<T*>(a.data[r]), here, result);
    }
  });
}

// Reduces, and spreads the result if `everywhere`. What the meetings of a segment publish:
//
//   the first     counterparts: partial sums are in the finisher's scratch
//   the second    counterparts: those are used up, and the result is in the own tensor
//
// No tensor is overwritten before it was read: inside an island one replica does both, and a
// counterpart's result arrives after its own partial sum was sent.
template <class T, class K>
DEVICE void island_reduce(const Arguments& a, bool everywhere) {
  IslandStation at = island_station<K>(a);
  const Cut cut = island_cut<T>(a, at);
  if (!meet_island(a, at, ++at.epoch)) return;
  for (long long s = 0; s < cut.num_segments; ++s) {
    reduce_inside<T, K>(a, at, cut, s);
    if (!meet_counterparts(a, at, ++at.epoch)) return;
    reduce_between<T, K>(a, at, cut, s, everywhere);
#ifndef MIRROR_PLANT_NO_CREDIT
    if (!meet_counterparts(a, at, ++at.epoch)) return;
#endif
    for (int i = 0; everywhere && i < at.k; ++i) {
      if (i == at.island) continue;
      const Range range = island_segment<T>(a, carrier_in(a, at, i), cut, s);
      copy_to_island<T, K>(a, at, at.self.id, range);
    }
  }
  if (!meet_island(a, at, ++at.epoch)) return;
  leave(at.mail, at.epoch);
}

// Copies the chunks that this place in the islands carries, in bytes, from `source` in island
// `from` (-1: each chunk from the replica that owns it) to all replicas: first inside that island
// and to the counterparts, then by these inside their islands.
template <class K>
DEVICE void island_spread(const Arguments& a, int source, int from) {
  using Byte = unsigned char;
  IslandStation at = island_station<K>(a);
  const Cut cut = island_cut<Byte>(a, at);
  ++at.epoch;
  if (!meet_island(a, at, at.epoch) || !meet_counterparts(a, at, at.epoch)) return;
  for (long long s = 0; s < cut.num_segments; ++s) {
    for (int i = 0; i < at.k; ++i) {
      if ((from < 0 ? i : from) != at.island) continue;
      const Range range = island_segment<Byte>(a, carrier_in(a, at, i), cut, s);
      const int in = from < 0 ? at.self.id : source;
      copy_to_island<Byte, K>(a, at, in, range);
      copy_to_group<Byte, K>(a, at, in, range, at.member, at.g, at.k);
    }
    if (!meet_counterparts(a, at, ++at.epoch)) return;
    for (int i = 0; i < at.k; ++i) {
      if ((from < 0 ? i : from) == at.island) continue;
      const Range range = island_segment<Byte>(a, carrier_in(a, at, i), cut, s);
      copy_to_island<Byte, K>(a, at, at.self.id, range);
    }
  }
  if (!meet_island(a, at, ++at.epoch)) return;
  leave(at.mail, at.epoch);
}

// Hierarchical all-reduce: reduce-scatter inside the islands, all-reduce of the shards between
// them, all-gather inside.
//
//   traffic       g members, k islands: about 2 (g - 1) / g * bytes per replica on fast links,
//                 2 (k - 1) / k * bytes / g on slow ones. Half types: 3 instead of 2 there, for
//                 partial sums travel as float32, 4 bytes for g terms of 2; or rounded, and 2
//   best for      large messages, where links between islands are much slower than inside
//   needs         islands of equal size; access inside an island and among counterparts
//   determinism   an element is reduced once and copied: outputs have equal bits. The order is
//                 replica order inside an island, then island order
template <class T, class K>
DEVICE void hierarchical_all_reduce(const Arguments& a) {
  island_reduce<T, K>(a, true);
}
MIRROR_REDUCTION(hierarchical_all_reduce)

// Hierarchical reduce-scatter: the first half of it.
template <class T, class K>
DEVICE void hierarchical_reduce_scatter(const Arguments& a) {
  island_reduce<T, K>(a, false);
}
MIRROR_REDUCTION(hierarchical_reduce_scatter)

// Hierarchical all-gather: a chunk crosses to each island once, and is spread inside.
template <class T, class K>
DEVICE void hierarchical_all_gather(const Arguments& a) {
  island_spread<K>(a, -1, -1);
}
MIRROR_COPY(hierarchical_all_gather)

// Hierarchical broadcast: the root's island reads from the root, in shards, one per member.
template <class T, class K>
DEVICE void hierarchical_broadcast(const Arguments& a) {
  island_spread<K>(a, a.root, a.position[a.root] / a.island_size);
}
MIRROR_COPY(hierarchical_broadcast)
