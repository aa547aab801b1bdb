// Launches one kernel per GPU, from a single C call.
//
// While the kernels of a collective wait for each other, the first one spins until the last one is
// launched. From Python each launch takes some 12 us, and in between another thread may get the
// GIL and make the driver wait for the GPU that spins: then nothing continues before the deadline.
// Here all kernels are launched within some microseconds, and a caller by ctypes does not hold the
// GIL. Callers in several threads take turns: see LaunchOrder in mirror/comm/collective_lock.py.
//
// The caller passes the addresses of the driver's C API at run time, so that building and
// importing this need no CUDA; dlopen() here would need glibc 2.34. Its types and values are
// copied below from cuda.h of CUDA 12 and 13; tests/comm/kernels compares them with that file if
// there is one.

#include <cstdint>
#include <cstring>
#include <mutex>

namespace {

using Result = int;  // CUresult; 0 is success

// As in cuda.h.
union AttributeValue {
  char pad[64];
  int cooperative;
};
struct Attribute {
  unsigned id;
  char pad[8 - sizeof(unsigned)];
  AttributeValue value;
};
struct Config {
  unsigned grid_x, grid_y, grid_z, block_x, block_y, block_z, shared_bytes;
  void* stream;
  Attribute* attributes;
  unsigned num_attributes;
};
constexpr unsigned kCooperative = 2;  // CU_LAUNCH_ATTRIBUTE_COOPERATIVE

// In the order of NAMES in mirror/comm/kernels/launcher.py.
struct Driver {
  Result (*init)(unsigned);
  Result (*device_get)(int*, int);
  Result (*retain)(void**, int);
  Result (*get_current)(void**);
  Result (*set_current)(void*);
  Result (*launch)(const Config*, void*, void**, void**);
  Result (*error_string)(Result, const char**);
};

constexpr int kMaxDevices = 64;
constexpr Result kNotLoaded = -1, kBadDevice = -2;

std::mutex loading;
Driver driver;
bool is_loaded = false;
void* contexts[kMaxDevices];

// Returns the context that the runtime, and so torch, uses on a device.
Result context_of(int device, void** context) {
  if (device < 0 || device >= kMaxDevices) return kBadDevice;
  const std::lock_guard<std::mutex> lock(loading);
  if (contexts[device] == nullptr) {
    int handle = 0;
    if (const Result result = driver.device_get(&handle, device)) return result;
    if (const Result result = driver.retain(&contexts[device], handle)) {
      contexts[device] = nullptr;
      return result;
    }
  }
  *context = contexts[device];
  return 0;
}

}  // namespace

extern "C" {

// One kernel on one device. Mirrored by a struct of mirror/comm/kernels/launcher.py.
struct Launch {
  void* function;   // CUfunction, of the device's primary context
  void* stream;     // CUstream
  void* arguments;  // the kernel's only parameter, which is copied
  int device;
  unsigned blocks, rows, threads;  // a grid of blocks x rows, blocks of so many threads
  int is_cooperative;
};

int mirror_launch_bytes() { return static_cast<int>(sizeof(Launch)); }

int mirror_driver_bytes() { return static_cast<int>(sizeof(Driver)); }

// Takes the addresses of the driver's functions once; returns whether the driver is ready.
bool mirror_use_driver(const Driver* found) {
  const std::lock_guard<std::mutex> lock(loading);
  if (is_loaded) return true;
  if (found->init(0) != 0) return false;
  driver = *found;
  return is_loaded = true;
}

// Launches all kernels in order; returns the driver's first error or 0, and its index in `failed`.
// Kernels after that are not launched. Restores the calling thread's context.
Result mirror_launch(const Launch* launches, int count, int* failed) {
  *failed = 0;
  if (!is_loaded) return kNotLoaded;
  void* targets[kMaxDevices];
  if (count > kMaxDevices) return kBadDevice;
  for (; *failed < count; ++*failed)  // all before the first launch: it may take long
    if (const Result result = context_of(launches[*failed].device, &targets[*failed]))
      return result;
  void* before = nullptr;
  if (const Result result = driver.get_current(&before)) return result;
  Result result = 0;
  for (*failed = 0; *failed < count; ++*failed) {
    const Launch& launch = launches[*failed];
    Attribute attribute;
    std::memset(&attribute, 0, sizeof attribute);
    attribute.id = kCooperative;
    attribute.value.cooperative = 1;
    const Config config{launch.blocks,  launch.rows, 1, launch.threads, 1, 1, 0, launch.stream,
                        &attribute, launch.is_cooperative ? 1u : 0u};
    void* parameters[] = {launch.arguments};
    result = driver.set_current(targets[*failed]);
    if (result == 0) result = driver.launch(&config, launch.function, parameters, nullptr);
    if (result != 0) break;
  }
  const Result restored = driver.set_current(before);
  return result != 0 ? result : restored;
}

// Returns the driver's text for an error; never null.
const char* mirror_driver_error(Result result) {
  if (result == kNotLoaded) return "the driver's library is not loaded";
  if (result == kBadDevice) return "there are too many devices";
  const char* text = nullptr;
  if (!is_loaded || driver.error_string(result, &text) != 0 || text == nullptr) return "unknown";
  return text;
}

}  // extern "C"
