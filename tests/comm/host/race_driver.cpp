// Calls the host library's collectives from several threads at once, for ThreadSanitizer, and
// checks what they leave. Includes the library as REDUCE_CPP, so that a test can change its text.
//
//   race_driver <callers> <threads of each call> <calls> <elements>

#include REDUCE_CPP

#include <cstdio>
#include <cstdlib>

namespace {

constexpr int kReplicas = 3;
constexpr int kFloat32 = 0, kSum = 0;

// One caller's tensors, in turn reduced, scattered, gathered and broadcast.
bool call_all(int caller, int calls, std::int64_t count, int num_threads) {
  std::vector<std::vector<float>> tensors(kReplicas, std::vector<float>(count));
  std::vector<void*> addresses;
  for (auto& tensor : tensors) addresses.push_back(tensor.data());
  for (int k = 0; k < calls; ++k) {
    for (int r = 0; r < kReplicas; ++r) {
      for (std::int64_t i = 0; i < count; ++i) {
        tensors[r][i] = static_cast<float>(caller + k + r + i % 7);
      }
    }
    const auto expected = [&](std::int64_t i) {
      return static_cast<float>(kReplicas * (caller + k + i % 7) + 3);
    };
    if (k % 3 == 0) {
      mirror_all_reduce(addresses.data(), &count, 1, kReplicas, kFloat32, kSum, 1.0, num_threads);
    } else if (k % 3 == 1) {
      mirror_reduce_scatter(addresses.data(), count, kReplicas, kFloat32, kSum, num_threads);
      mirror_all_gather(addresses.data(), count, kReplicas, kFloat32, num_threads);
    } else {
      mirror_all_reduce(addresses.data(), &count, 1, kReplicas, kFloat32, kSum, 1.0, num_threads);
      std::fill(tensors[1].begin(), tensors[1].end(), -1.0f);
      mirror_broadcast(addresses.data(), count, kReplicas, kFloat32, 0, num_threads);
    }
    for (const auto& tensor : tensors) {
      for (std::int64_t i = 0; i < count; ++i) {
        if (tensor[i] != expected(i)) {
          std::printf("caller %d, call %d, element %lld: %g, not %g\n", caller, k,
                      static_cast<long long>(i), tensor[i], expected(i));
          return false;
        }
      }
    }
  }
  return true;
}

}  // namespace

int main(int, char** arguments) {
  const int num_callers = std::atoi(arguments[1]), num_threads = std::atoi(arguments[2]);
  const int calls = std::atoi(arguments[3]);
  const std::int64_t count = std::atoll(arguments[4]);
  std::vector<std::thread> callers;
  std::atomic<bool> is_right{true};
  for (int c = 0; c < num_callers; ++c) {
    callers.emplace_back([&, c] {
      if (!call_all(c, calls, count, num_threads)) is_right = false;
    });
  }
  for (auto& caller : callers) caller.join();
  return is_right ? 0 : 1;
}
