// A program around the simulated devices, for race detectors: no Python, whose threads and
// allocator they would look at, too. tests/comm/kernels/test_races.py builds and runs it.
//
//   race_driver ALGORITHM REPLICAS BLOCKS THREADS CALLS FIRST_COUNT ELEMENTS SHIFT
//
// Runs so many calls, of all kernels of the algorithm in turn, back to back: a replica goes on to
// its next call while others are in earlier ones. All counters start at FIRST_COUNT. CALLS is to
// be a multiple of 20, for a reduce-scatter leaves results in pieces until the all-gather. Every
// second replica's tensors begin SHIFT elements after where memory is aligned. Ends with 0 if all
// results are right, 1 if not, 2 if a replica waited too long.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>

#define MIRROR_ONLY_INT32
#include "../../../csrc/host/simulate.cpp"

namespace {

constexpr int kInt32 = 4, kBytes = 6;
constexpr int kScratchBytes = 2048;  // little, so that a call has many segments
constexpr int kOneShotCount = 200;   // what fits into half of one block's scratch, at least
constexpr long long kTimeoutNs = 60'000'000'000;

struct Memory {
  explicit Memory(std::size_t bytes) {
    pointer = std::aligned_alloc(128, (bytes + 127) / 128 * 128);
    std::memset(pointer, 0, bytes);
  }
  ~Memory() { std::free(pointer); }
  Memory(const Memory&) = delete;
  void* pointer;
};

// The tensors of one message on all replicas, `shift` elements off 16 bytes on the odd ones.
struct Message {
  Message(int num_replicas, int count, int shift) : count(count) {
    for (int r = 0; r < num_replicas; ++r) {
      memory.push_back(std::make_unique<Memory>((count + shift) * sizeof(std::uint32_t)));
      tensors.push_back(static_cast<std::uint32_t*>(memory.back()->pointer) + r % 2 * shift);
      for (int i = 0; i < count; ++i) tensors[r][i] = 1000 * r + i;
    }
  }
  int count;
  std::vector<std::unique_ptr<Memory>> memory;
  std::vector<std::uint32_t*> tensors;
};

std::vector<std::string> kernels_of(const std::string& algorithm) {
  std::vector<std::string> names = {"reduce_scatter", "all_gather", "broadcast"};
  if (algorithm == "direct") {
    names.insert(names.begin(), {"one_shot", "two_shot"});
  } else {
    names.insert(names.begin(), "all_reduce");
  }
  for (std::string& name : names) name = algorithm + "_" + name;
  return names;
}

bool ends_with(const std::string& name, const char* end) {
  const std::size_t length = std::strlen(end);
  return name.size() >= length && name.compare(name.size() - length, length, end) == 0;
}

// Lets all the counters of a workspace begin at a value: as if that many calls were over.
void set_counters(void* workspace, int num_blocks, unsigned value, const std::string& algorithm) {
  for (int b = 0; b < num_blocks; ++b) {
    char* state = static_cast<char*>(workspace) + b * kStateBytes;
    if (algorithm == "ring") {
      auto* channel = reinterpret_cast<RingChannel*>(state);
      channel->filled.value = channel->landed.value = value;
      channel->credit.value = channel->opened.value = value;
      channel->counters = {value, value, value, value, value};
    } else {
      auto* mail = reinterpret_cast<Mailbox*>(state);
      for (Flag& flag : mail->from) flag.value = value;
      mail->epoch = value;
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 9) return 3;
  const std::string algorithm = argv[1];
  const int n = std::atoi(argv[2]), blocks = std::atoi(argv[3]), threads = std::atoi(argv[4]);
  const int num_calls = std::atoi(argv[5]), count = std::atoi(argv[7]);
  const int shift = std::atoi(argv[8]);
  const auto first_count = static_cast<unsigned>(std::strtoul(argv[6], nullptr, 0));
  const std::vector<std::string> kernels = kernels_of(algorithm);

  std::vector<std::unique_ptr<Memory>> workspaces;
  for (int r = 0; r < n; ++r) {
    workspaces.push_back(std::make_unique<Memory>(blocks * (kStateBytes + kScratchBytes)));
    set_counters(workspaces.back()->pointer, blocks, first_count, algorithm);
  }
  Memory errors(n * sizeof(Flag));

  // Reductions work on one message again and again, with the results of the one before; a
  // broadcast has one of its own, which differs between replicas.
  Message shared(n, count, shift);
  std::vector<std::uint32_t> expected(count);
  for (int i = 0; i < count; ++i) expected[i] = i;  // by replica: + 1000 * r, until first reduced
  bool is_equal = false;
  std::vector<std::unique_ptr<Message>> sent;
  std::vector<int> roots;

  std::vector<const char*> names;
  std::vector<int> elements;
  std::vector<Arguments> calls;
  // A two-shot or ring all-reduce of everything comes first, so that all replicas are equal.
  for (int i = 0; i < num_calls; ++i) {
    const std::string& name = kernels[(i + (algorithm == "direct")) % kernels.size()];
    const bool is_broadcast = ends_with(name, "broadcast");
    const bool is_copy = is_broadcast || ends_with(name, "all_gather");
    if (is_broadcast) {
      sent.push_back(std::make_unique<Message>(n, 150, shift));
      roots.push_back(i % n);
    }
    const Message& message = is_broadcast ? *sent.back() : shared;
    Arguments a = {};
    for (int r = 0; r < n; ++r) {
      a.data[r] = message.tensors[r];
      a.workspace[r] = workspaces[r]->pointer;
      a.rows[r] = r;
      // Islands of replicas that are not side by side: 0 2 4 | 1 3 5.
      const int half = n % 2 == 0 ? 2 : 1;
      a.order[r] = r % (n / half) * half + r / (n / half);
      a.position[a.order[r]] = r;
      a.island_size = n / half;
    }
    a.errors = errors.pointer;
    a.count = message.count;
    if (ends_with(name, "one_shot")) a.count = std::min(kOneShotCount, message.count);
    a.scratch_bytes = kScratchBytes;
    a.timeout_ns = kTimeoutNs;
    a.scale = 1;
    a.num_replicas = n;
    a.op = kSum;
    a.root = is_broadcast ? roots.back() : 0;
    a.element_bytes = sizeof(std::uint32_t);
    a.state_blocks = blocks;
    a.call = i;
    calls.push_back(a);
    names.push_back(name.c_str());
    elements.push_back(is_copy ? kBytes : kInt32);
    if (is_copy) continue;
    for (int j = 0; j < a.count; ++j) {
      const auto terms = static_cast<std::uint32_t>(n);
      expected[j] = expected[j] * terms + (is_equal ? 0 : 1000u * n * (n - 1) / 2);
    }
    is_equal = true;
  }
  const int result = mirror_simulate(names.data(), elements.data(), calls.data(), num_calls,
                                     blocks, threads, 0, nullptr);
  if (result != kDone) return 3;
  for (int r = 0; r < n; ++r) {
    const unsigned word = static_cast<Flag*>(errors.pointer)[r].value;
    if (word == 0) continue;
    const unsigned call = word >> 8 & 0x7fffff, awaited = word & 0xff;
    std::printf("call %u: replica %d waited for replica %u\n", call, r, awaited);
    return 2;
  }
  int wrong = 0;
  for (int r = 0; r < n; ++r) {
    for (int i = 0; i < count; ++i) wrong += shared.tensors[r][i] != expected[i];
    for (std::size_t m = 0; m < sent.size(); ++m) {
      for (int i = 0; i < sent[m]->count; ++i) {
        wrong += sent[m]->tensors[r][i] != static_cast<std::uint32_t>(1000 * roots[m] + i);
      }
    }
  }
  if (wrong != 0) std::printf("%d wrong elements\n", wrong);
  return wrong != 0;
}
