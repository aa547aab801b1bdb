/* A model of the ring's protocol (csrc/ring.cu) for Spin: slots, credit, landings, several calls.
 *
 *   spin -a ring.pml && gcc -O2 -DMEMLIM=8000 -DSAFETY -o pan pan.c && ./pan -m1000000
 *
 * N replicas run CALLS calls of SEGMENTS segments each, every one an all-reduce or a
 * reduce-scatter; all replicas choose the same. Flags are modelled as sequentially consistent;
 * ThreadSanitizer checks the memory order, in tests/comm/kernels/test_races.py. Spin looks for
 * these errors in all interleavings:
 *
 *   deadlock       a replica waits forever (Spin: invalid end state)
 *   overwriting    a slot is filled before its last message is taken out (assertion in `put`)
 *   mix-up         what is taken out is not what this step is about (assertion in `take`)
 *   early landing  a tensor is written before its owner has read it (assertion in `land`)
 *   wrap-around    counters are of 3 bits, are compared by signed difference, and wrap around
 *
 * A message's contents are its number: call, segment, chunk. See README.md for the results.
 */

#ifndef N
#define N 3
#endif
#ifndef SLOTS
#define SLOTS 2
#endif
#ifndef SEGMENTS
#define SEGMENTS 2
#endif
#ifndef CALLS
#define CALLS 2
#endif

/* Counters modulo 8; a - b as a signed difference is below zero if its third bit is set. */
#define COUNT(x) ((x) & 7)
#define REACHED(flag, target) ((COUNT((flag) - (target)) & 4) == 0)

#define NEXT(r) (((r) + 1) % N)
#define PREV(r) (((r) + N - 1) % N)
#define AT(r, c) ((r) * N + (c))
#define TAG(call, s, c) ((((call) * SEGMENTS + (s)) * N + (c)) + 1)

/* Flags, by the replica that polls them. */
byte filled[N];
byte credit[N];
byte landed[N];

byte slot[N * SLOTS];  /* 0: taken out */
byte has_read[N * N];  /* by replica and chunk: the tag of the segment last read of the tensor */
byte result[N * N];    /* by replica and chunk: the tag last landed */

bool scatter_only[CALLS];

inline put(me, what) {
#ifndef NO_CREDIT
  REACHED(credit[me], COUNT(sent + 1 - SLOTS));
#endif
  d_step {
    assert(slot[NEXT(me) * SLOTS + sent % SLOTS] == 0);
    slot[NEXT(me) * SLOTS + sent % SLOTS] = what;
  }
  sent = COUNT(sent + 1);
  filled[NEXT(me)] = sent;
}

/* Emptying a slot and giving credit for it are two steps, as in the kernel. */
inline take(me, what) {
  REACHED(filled[me], COUNT(taken + 1));
  d_step {
    assert(slot[me * SLOTS + taken % SLOTS] == what);
    slot[me * SLOTS + taken % SLOTS] = 0;
  }
  taken = COUNT(taken + 1);
  credit[PREV(me)] = taken;
}

/* Writes into the next replica's tensor, which must have been read: what is written has a term of
 * it. */
inline land(me, chunk, what) {
  d_step {
    assert(has_read[AT(NEXT(me), chunk)] == what);
    result[AT(NEXT(me), chunk)] = what;
  }
  written = COUNT(written + 1);
  landed[NEXT(me)] = written;
}

inline await_landing(me, chunk, what) {
  REACHED(landed[me], COUNT(seen + 1));
  seen = COUNT(seen + 1);
  assert(result[AT(me, chunk)] == what);
}

proctype replica(byte r) {
  /* Counters begin where they wrap around soon. */
  byte sent = 6, taken = 6, written = 6, seen = 6;
  byte call = 0, s, back, c;
  do
  :: call < CALLS ->
    s = 0;
    do
    :: s < SEGMENTS ->
      /* First terms, then terms on the way: chunk r - back at step back. */
      back = 1;
      do
      :: back < N ->
        c = (r + N - back) % N;
        if
        :: back > 1 -> take(r, TAG(call, s, c))
        :: else -> skip
        fi;
        has_read[AT(r, c)] = TAG(call, s, c);
        put(r, TAG(call, s, c));
        back++
      :: else -> break
      od;
      take(r, TAG(call, s, r));
      has_read[AT(r, r)] = TAG(call, s, r);
      result[AT(r, r)] = TAG(call, s, r);
      if
      :: scatter_only[call] -> skip
      :: else ->
        land(r, r, TAG(call, s, r));
        back = 1;
        do
        :: back < N ->
          c = (r + N - back) % N;
          await_landing(r, c, TAG(call, s, c));
          if
          :: back < N - 1 -> land(r, c, TAG(call, s, c))
          :: else -> skip
          fi;
          back++
        :: else -> break
        od
      fi;
      s++
    :: else -> break
    od;
    call++
  :: else -> break
  od
}

init {
  byte i;
  atomic {
    for (i : 0 .. N - 1) {
      filled[i] = 6;
      credit[i] = 6;
      landed[i] = 6;
    }
    for (i : 0 .. CALLS - 1) {
      if
      :: scatter_only[i] = true
      :: scatter_only[i] = false
      fi
    }
    for (i : 0 .. N - 1) {
      run replica(i)
    }
  }
}
