// A libnccl without GPUs: the functions that mirror calls, on host memory, with faults on order.
//
// Like a non-blocking NCCL: what ncclGroupEnd starts is in progress until ncclCommGetAsyncError
// has been asked `polls` times, about any rank; then it is done, all at once. Ranks whose peers
// have not joined are in progress for ever. An abort ends what waits, and frees.
//
// Stricter than NCCL where mirror should be careful: half types and floating min and max are
// refused (NCCL would round at every hop, and drop NaNs), so are communicators in the wrong state,
// ranks whose calls do not match, messages to oneself or in a group with collectives, and handles
// that are not alive; the last are counted.
//
//   fake_reset()                    no faults, no counts; 0 polls
//   fake_polls(n)                   how long everything is in progress
//   fake_fail(function, n, result)  its n-th call from now returns that, and does nothing
//   fake_hang(function, n)          its n-th call from now returns when something is aborted, and
//                                   fails then, unless it frees
//   fake_poison(result)             the next operation that is done has failed with that
//   fake_stall(function)            what these calls started stays in progress; "" for nothing
//   fake_absent(rank)               that rank's calls are lost: it never joins; -1 for none
//   fake_spoil(bytes)               from now on results are wrong in the last of so many bytes
//   fake_sent()                     bytes that ranks have sent each other, by the least there is
//   fake_alive(), fake_calls(function), fake_misuses()
//
// One thread at a time, but for hanging calls and aborts.

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>
#include <condition_variable>
#include <set>
#include <string>
#include <vector>

namespace {

enum Result { kSuccess, kCuda, kSystem, kInternal, kArgument, kUsage, kRemote, kInProgress };
enum Kind { kAllReduce, kReduce, kBroadcast, kReduceScatter, kAllGather, kSend, kReceive };

constexpr int kUndefined = INT32_MIN;

struct UniqueId {
  char internal[128];
};

// As in nccl.h of 2.18, written down independently of the code under test.
struct Config {
  size_t size;
  unsigned magic, version;
  int blocking, cga_cluster_size, min_ctas, max_ctas;
  const char *net_name;
  int split_share;
};
static_assert(sizeof(Config) == 48);

struct Operation {
  Kind kind;
  const void *send;
  void *receive;
  size_t count;
  int type, op, root;

  bool is_message() const { return kind == kSend || kind == kReceive; }
  bool matches(const Operation &other) const {
    return kind == other.kind && count == other.count && type == other.type && op == other.op &&
           root == other.root;
  }
};

struct Clique;

struct Comm {
  Clique *clique = nullptr;
  int rank = 0;
  Result state = kInProgress;
  bool ready = false;  // for the operation that is in progress
  std::vector<Operation> operations;
  bool finalized = false;
};

struct Clique {
  int size = 0, polls_left = 0;
  std::map<int, Comm *> ranks;
  std::string started;  // by which function what is in progress was started
};

std::recursive_mutex mutex;
std::condition_variable_any aborted;
int num_aborts = 0;
std::map<std::string, Clique> cliques;
std::set<Comm *> alive;
std::map<std::string, int> calls;
std::map<std::string, std::map<int, int>> failures;  // function, call -> result
std::map<std::string, std::set<int>> hangs;
std::string stalled;
int polls = 0, absent = -1, misuses = 0, next_id = 0, poison = 0;
size_t spoiled = 0, sent = 0;
const char *last_error = "";

// As in NCCL, a group belongs to a thread.
thread_local int depth = 0;
thread_local Result group_error = kSuccess;
thread_local std::vector<Comm *> in_group;
thread_local std::string group_function;

// Counts the call; returns what it has to fail with, kSuccess for nothing.
Result enter(const char *function) {
  std::unique_lock lock(mutex);
  int number = ++calls[function];
  if (hangs[function].count(number)) {
    int before = num_aborts;
    aborted.wait(lock, [before] { return num_aborts != before; });
    std::string name = function;
    if (name == "ncclCommDestroy" || name == "ncclCommAbort") return kSuccess;
    last_error = "the call was aborted";
    return kInternal;
  }
  auto found = failures[function].find(number);
  if (found == failures[function].end()) return kSuccess;
  last_error = "a fault on order";
  return static_cast<Result>(found->second);
}

Result refuse(Result result, const char *why) {
  last_error = why;
  if (depth > 0) group_error = result;
  return result;
}

bool is_alive(Comm *comm) {
  if (alive.count(comm)) return true;
  misuses++;
  return false;
}

size_t bytes_of(int type) {
  switch (type) {
    case 1: return 1;
    case 2: case 7: return 4;
    case 4: case 8: return 8;
    case 6: case 9: return 2;
    default: return 0;
  }
}

template <typename T>
T combined(T a, T b, int op) {
  switch (op) {
    case 0: return static_cast<T>(a + b);
    case 1: return static_cast<T>(a * b);
    case 2: return std::max(a, b);
    default: return std::min(a, b);
  }
}

// Unsigned where it does not matter for the result, so that overflow wraps around.
template <typename T>
std::vector<char> reduced(const std::vector<const Operation *> &ops, size_t count, int op) {
  std::vector<char> bytes(count * sizeof(T));
  auto *total = reinterpret_cast<T *>(bytes.data());
  std::memcpy(total, ops[0]->send, bytes.size());
  for (size_t r = 1; r < ops.size(); r++) {
    auto *from = static_cast<const T *>(ops[r]->send);
    for (size_t i = 0; i < count; i++) total[i] = combined(total[i], from[i], op);
  }
  return bytes;
}

std::vector<char> reduced(const std::vector<const Operation *> &ops, size_t count) {
  int op = ops[0]->op;
  bool ordered = op >= 2;
  switch (ops[0]->type) {
    case 1: return reduced<uint8_t>(ops, count, op);
    case 2: return ordered ? reduced<int32_t>(ops, count, op) : reduced<uint32_t>(ops, count, op);
    case 4: return ordered ? reduced<int64_t>(ops, count, op) : reduced<uint64_t>(ops, count, op);
    case 7: return reduced<float>(ops, count, op);
    default: return reduced<double>(ops, count, op);
  }
}

void execute(const std::vector<const Operation *> &ops) {
  const Operation &first = *ops[0];
  size_t n = ops.size(), bytes = first.count * bytes_of(first.type);
  std::vector<char> result;
  switch (first.kind) {
    case kAllReduce:
    case kReduce:
      result = reduced(ops, first.count);
      break;
    case kReduceScatter:
      result = reduced(ops, first.count * n);
      break;
    case kBroadcast: {
      auto *from = static_cast<const char *>(ops[first.root]->send);
      result.assign(from, from + bytes);
      break;
    }
    default:  // kAllGather
      for (const Operation *op : ops) {
        auto *from = static_cast<const char *>(op->send);
        result.insert(result.end(), from, from + bytes);
      }
  }
  bool scatters = first.kind == kReduceScatter || first.kind == kAllGather;
  sent += (n - 1) * bytes * (scatters ? n : first.kind == kAllReduce ? 2 : 1);
  if (spoiled && result.size() >= spoiled) result[spoiled - 1] ^= 1;
  for (size_t r = 0; r < n; r++) {
    if (first.kind == kReduce && static_cast<int>(r) != first.root) continue;
    size_t offset = first.kind == kReduceScatter ? r * bytes : 0;
    size_t size = first.kind == kReduceScatter ? bytes : result.size();
    std::memcpy(ops[r]->receive, result.data() + offset, size);
  }
}

// Hands over the messages of a group; the k-th from one rank to another is the k-th that it awaits.
Result deliver(Clique &clique) {
  using Messages = std::map<std::pair<int, int>, std::vector<const Operation *>>;
  Messages out, in;
  for (auto &[rank, comm] : clique.ranks) {
    for (const Operation &op : comm->operations) {
      if (!op.is_message()) return refuse(kUsage, "a group of messages and collectives");
      if (op.kind == kSend) out[{rank, op.root}].push_back(&op);
      else in[{op.root, rank}].push_back(&op);
    }
  }
  if (out.size() != in.size()) return refuse(kUsage, "a message that no rank receives, or sends");
  for (auto &[way, messages] : out) {
    auto &awaited = in[way];
    if (awaited.size() != messages.size()) return refuse(kUsage, "more messages than are awaited");
    for (size_t i = 0; i < messages.size(); i++) {
      size_t bytes = messages[i]->count * bytes_of(messages[i]->type);
      if (bytes != awaited[i]->count * bytes_of(awaited[i]->type))
        return refuse(kUsage, "a message of another length");
      std::memcpy(awaited[i]->receive, messages[i]->send, bytes);
      if (spoiled && bytes >= spoiled) static_cast<char *>(awaited[i]->receive)[spoiled - 1] ^= 1;
      sent += bytes;
    }
  }
  return kSuccess;
}

// Does what is in progress if everybody is ready and waited for long enough.
void advance(Clique &clique) {
  if (clique.started == stalled || clique.polls_left > 0) return;
  if (static_cast<int>(clique.ranks.size()) < clique.size) return;
  for (auto &[rank, comm] : clique.ranks) {
    if (!comm->ready) return;
  }
  Result outcome = static_cast<Result>(poison);
  poison = 0;
  size_t length = clique.ranks[0]->operations.size();
  bool has_messages = false;
  for (auto &[rank, comm] : clique.ranks) {
    for (const Operation &op : comm->operations) has_messages |= op.is_message();
  }
  if (has_messages) {
    if (outcome == kSuccess) outcome = deliver(clique);
    length = 0;
  }
  for (auto &[rank, comm] : clique.ranks) {
    if (!has_messages && comm->operations.size() != length)
      outcome = refuse(kUsage, "ranks differ in calls");
  }
  for (size_t i = 0; i < length && outcome == kSuccess; i++) {
    std::vector<const Operation *> ops;
    for (auto &[rank, comm] : clique.ranks) ops.push_back(&comm->operations[i]);
    for (auto *op : ops) {
      if (!op->matches(*ops[0])) outcome = refuse(kUsage, "ranks differ in arguments");
    }
    if (outcome == kSuccess) execute(ops);
  }
  for (auto &[rank, comm] : clique.ranks) {
    comm->state = outcome;
    comm->ready = false;
    comm->operations.clear();
  }
}

void join(Comm *comm, const char *function) {
  group_function = function;
  if (std::find(in_group.begin(), in_group.end(), comm) == in_group.end()) in_group.push_back(comm);
}

Result collective(const char *function, Kind kind, const void *send, void *receive, size_t count,
                  int type, int op, int root, Comm *comm) {
  if (Result result = enter(function)) return refuse(result, last_error);
  std::lock_guard lock(mutex);
  if (!is_alive(comm)) return refuse(kArgument, "the communicator is not alive");
  if (depth == 0) return refuse(kUsage, "one thread needs a group");
  if (comm->state != kSuccess) return refuse(kArgument, "the communicator is not ready");
  if (bytes_of(type) == 0 || op < 0 || op > 3 || root < 0 || root >= comm->clique->size)
    return refuse(kArgument, "a bad argument");
  bool reduces = kind == kAllReduce || kind == kReduce || kind == kReduceScatter;
  if (reduces && (type == 6 || type == 9)) return refuse(kArgument, "half types lose accuracy");
  if (reduces && (type == 7 || type == 8) && op >= 2) return refuse(kArgument, "NaNs get lost");
  bool is_message = kind == kSend || kind == kReceive;
  if (is_message && root == comm->rank) return refuse(kArgument, "a message to oneself");
  if (comm->rank == absent) return kSuccess;
  comm->operations.push_back({kind, send, receive, count, type, op, root});
  join(comm, function);
  return kSuccess;
}

void forget(Comm *comm) {
  comm->clique->ranks.erase(comm->rank);
  alive.erase(comm);
  delete comm;
}

}  // namespace

extern "C" {

void fake_reset() {
  std::lock_guard lock(mutex);
  calls.clear();
  failures.clear();
  hangs.clear();
  stalled.clear();
  polls = misuses = poison = 0;
  absent = -1;
  spoiled = sent = 0;
}

void fake_polls(int n) { polls = n; }
void fake_absent(int rank) { absent = rank; }
void fake_poison(int result) { poison = result; }
void fake_spoil(size_t bytes) { spoiled = bytes; }
void fake_stall(const char *function) { stalled = function; }
int fake_alive() { return static_cast<int>(alive.size()); }
int fake_misuses() { return misuses; }
size_t fake_sent() { return sent; }

int fake_calls(const char *function) {
  std::lock_guard lock(mutex);
  return calls[function];
}

void fake_fail(const char *function, int n, int result) {
  std::lock_guard lock(mutex);
  failures[function][calls[function] + n] = result;
}

void fake_hang(const char *function, int n) {
  std::lock_guard lock(mutex);
  hangs[function].insert(calls[function] + n);
}

const char *ncclGetErrorString(int result) {
  return result == kSuccess ? "no error" : result == kInProgress ? "in progress" : "some error";
}

const char *ncclGetLastError(Comm *) { return last_error; }

int ncclGetVersion(int *version) {
  *version = 22809;
  return kSuccess;
}

int ncclGetUniqueId(UniqueId *id) {
  if (Result result = enter("ncclGetUniqueId")) return result;
  std::memset(id, 0, sizeof *id);
  std::memcpy(id->internal + 100, &++next_id, sizeof next_id);
  return kSuccess;
}

int ncclGroupStart() {
  if (Result result = enter("ncclGroupStart")) return result;
  if (depth++ == 0) {
    group_error = kSuccess;
    in_group.clear();
  }
  return kSuccess;
}

int ncclGroupEnd() {
  Result injected = enter("ncclGroupEnd");
  std::lock_guard lock(mutex);
  if (depth == 0) return kUsage;
  if (--depth > 0) return kSuccess;
  std::vector<Comm *> comms;
  comms.swap(in_group);
  Result error = injected ? injected : group_error;
  for (Comm *comm : comms) {
    if (!alive.count(comm)) continue;
    comm->state = error ? error : kInProgress;
    comm->ready = !error;
    comm->clique->polls_left = polls;
    comm->clique->started = group_function;
    if (error) comm->operations.clear();
  }
  if (error) return error;
  for (Comm *comm : comms) advance(*comm->clique);
  for (Comm *comm : comms) {
    if (comm->state != kSuccess) return kInProgress;
  }
  return kSuccess;
}

int ncclCommInitRankConfig(Comm **out, int size, UniqueId id, int rank, Config *config) {
  *out = nullptr;
  if (Result result = enter("ncclCommInitRankConfig")) return refuse(result, last_error);
  std::lock_guard lock(mutex);
  // What lies behind the fields of 2.18 is what newer versions read: it must be undefined, too.
  int behind = 0;
  if (config->size > offsetof(Config, split_share) + sizeof(int))
    std::memcpy(&behind, &config->split_share + 1, sizeof behind);
  else
    behind = kUndefined;
  bool fits = config->size == sizeof(Config) && config->magic == 0xcafebeef &&
              config->version >= 21700 && config->blocking == 0 &&
              config->cga_cluster_size == kUndefined && config->min_ctas == kUndefined &&
              config->max_ctas == kUndefined && !config->net_name &&
              config->split_share == kUndefined && behind == kUndefined;
  if (!fits || rank < 0 || rank >= size) return refuse(kArgument, "a bad configuration or rank");
  if (depth == 0 && size > 1) return refuse(kUsage, "one thread needs a group");
  Clique &clique = cliques[std::string(id.internal, sizeof id.internal)];
  clique.size = size;
  Comm *comm = new Comm;
  comm->clique = &clique;
  comm->rank = rank;
  alive.insert(comm);
  *out = comm;
  if (rank == absent) return kInProgress;
  clique.ranks[rank] = comm;
  join(comm, "ncclCommInitRankConfig");
  return kInProgress;
}

int ncclCommFinalize(Comm *comm) {
  if (Result result = enter("ncclCommFinalize")) return refuse(result, last_error);
  std::lock_guard lock(mutex);
  if (!is_alive(comm) || comm->finalized) return refuse(kArgument, "not alive");
  comm->finalized = true;
  join(comm, "ncclCommFinalize");
  return kInProgress;
}

int ncclCommDestroy(Comm *comm) {
  if (Result result = enter("ncclCommDestroy")) return result;
  std::lock_guard lock(mutex);
  if (!is_alive(comm)) return kArgument;
  forget(comm);
  return kSuccess;
}

int ncclCommAbort(Comm *comm) {
  Result result = enter("ncclCommAbort");
  std::lock_guard lock(mutex);
  if (!is_alive(comm)) return kArgument;
  forget(comm);  // even where it reports a failure, as far as it can
  num_aborts++;
  aborted.notify_all();
  return result;
}

int ncclCommGetAsyncError(Comm *comm, int *state) {
  *state = kSuccess;
  if (Result result = enter("ncclCommGetAsyncError")) return result;
  std::lock_guard lock(mutex);
  if (!is_alive(comm)) return kArgument;
  if (comm->clique->polls_left > 0) comm->clique->polls_left--;
  if (comm->state == kInProgress) advance(*comm->clique);
  *state = comm->state;
  return kSuccess;
}

int ncclAllReduce(const void *send, void *receive, size_t count, int type, int op, Comm *comm,
                  void *) {
  return collective("ncclAllReduce", kAllReduce, send, receive, count, type, op, 0, comm);
}

int ncclReduce(const void *send, void *receive, size_t count, int type, int op, int root,
               Comm *comm, void *) {
  return collective("ncclReduce", kReduce, send, receive, count, type, op, root, comm);
}

int ncclBroadcast(const void *send, void *receive, size_t count, int type, int root, Comm *comm,
                  void *) {
  return collective("ncclBroadcast", kBroadcast, send, receive, count, type, 0, root, comm);
}

int ncclReduceScatter(const void *send, void *receive, size_t count, int type, int op, Comm *comm,
                      void *) {
  return collective("ncclReduceScatter", kReduceScatter, send, receive, count, type, op, 0, comm);
}

int ncclAllGather(const void *send, void *receive, size_t count, int type, Comm *comm, void *) {
  return collective("ncclAllGather", kAllGather, send, receive, count, type, 0, 0, comm);
}

int ncclSend(const void *send, size_t count, int type, int peer, Comm *comm, void *) {
  return collective("ncclSend", kSend, send, nullptr, count, type, 0, peer, comm);
}

int ncclRecv(void *receive, size_t count, int type, int peer, Comm *comm, void *) {
  return collective("ncclRecv", kReceive, nullptr, receive, count, type, 0, peer, comm);
}

}  // extern "C"
