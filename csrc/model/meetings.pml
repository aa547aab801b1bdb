/* A model of meetings and epochs (csrc/collective.h: meet; csrc/direct.cu) for Spin.
 *
 *   spin -a meetings.pml && gcc -O2 -DSAFETY -o pan pan.c && ./pan -m1000000
 *
 * N replicas run CALLS calls, each a one-shot all-reduce (one meeting; scratch whose halves take
 * turns by call) or a two-shot one (two meetings; in between, other replicas read and write each
 * tensor). All replicas choose the same. Spin looks for these errors in all interleavings:
 *
 *   deadlock       a replica waits forever (Spin: invalid end state)
 *   overwriting    half of a scratch is written while a replica still reads it in an earlier call
 *   trespassing    a tensor is accessed by others outside of its owner's call (assertions)
 *   wrap-around    epochs are of 3 bits, are compared by signed difference, and wrap around
 *
 * HALVES=1 and NO_ENTRY plant bugs. See README.md for the results.
 */

#ifndef N
#define N 3
#endif
#ifndef CALLS
#define CALLS 4
#endif
#ifndef HALVES
#define HALVES 2
#endif

#define COUNT(x) ((x) & 7)
#define REACHED(flag, target) ((COUNT((flag) - (target)) & 4) == 0)

byte from[N * N];        /* by the replica that polls, and the writer */
byte scratch[N * 2];     /* by replica and half: the call that wrote it */
byte open[N];            /* the call in which a tensor may be accessed by others; 0: none */
bool two_shot[CALLS + 1];

/* Posts to everyone, then waits foreveryone, as the threads of a block do by turns. */
inline meet(me, epoch) {
  i = 0;
  do
  :: i < N -> from[i * N + me] = epoch; i++
  :: else -> break
  od;
  i = 0;
  do
  :: i < N -> REACHED(from[me * N + i], epoch); i++
  :: else -> break
  od
}

proctype replica(byte r) {
  byte epoch = 4, call = 1, i;
  do
  :: call <= CALLS ->
    if
    :: two_shot[call] ->
      open[r] = call;
#ifndef NO_ENTRY
      meet(r, COUNT(epoch + 1));
#endif
      i = 0;
      do
      :: i < N -> assert(open[i] == call); i++
      :: else -> break
      od;
      meet(r, COUNT(epoch + 2));
      open[r] = 0
    :: else ->
      scratch[r * 2 + call % HALVES] = call;
      meet(r, COUNT(epoch + 2));
      i = 0;
      do
      :: i < N -> assert(scratch[i * 2 + call % HALVES] == call); i++
      :: else -> break
      od
    fi;
    epoch = COUNT(epoch + 2);
    call++
  :: else -> break
  od
}

init {
  byte k;
  atomic {
    for (k : 0 .. N * N - 1) {
      from[k] = 4;
    }
    for (k : 1 .. CALLS) {
      if
      :: two_shot[k] = true
      :: two_shot[k] = false
      fi
    }
    for (k : 0 .. N - 1) {
      run replica(k)
    }
  }
}
