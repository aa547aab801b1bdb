// A CUDA driver that launches nothing: it notes what it is asked, and refuses or lingers on order.

#include <chrono>
#include <cstring>
#include <mutex>
#include <thread>

namespace {

struct Config {
  unsigned grid_x, grid_y, grid_z, block_x, block_y, block_z, shared_bytes;
  void* stream;
  unsigned char* attributes;
  unsigned num_attributes;
};

thread_local void* current = nullptr;
std::mutex lock;
int num_launches = 0, refuse_at = -1, num_retained = 0, absent_device = -1;
int pause_ms = 0;

}  // namespace

extern "C" {

struct Seen {
  void* function;
  void* stream;
  void* context;
  unsigned blocks, rows, threads, depth;
  int is_cooperative, call;
  long long first;  // of the parameter: what a kernel would find
};

Seen seen[64];

void fake_reset(int refuse, int absent) {
  num_launches = 0;
  refuse_at = refuse;
  absent_device = absent;
}
void fake_pause_after_launches(int milliseconds) { pause_ms = milliseconds; }
int fake_launches() { return num_launches; }
int fake_retained() { return num_retained; }
void* fake_current() { return current; }
void fake_make_current(void* context) { current = context; }
const Seen* fake_seen(int i) { return &seen[i]; }

int cuInit(unsigned) { return 0; }
int cuDeviceGet(int* device, int ordinal) {
  *device = ordinal + 100;
  return ordinal == absent_device ? 101 : 0;
}
int cuDevicePrimaryCtxRetain(void** context, int device) {
  ++num_retained;
  *context = reinterpret_cast<void*>(static_cast<long>(device) * 16);
  return 0;
}
int cuCtxGetCurrent(void** context) {
  *context = current;
  return 0;
}
int cuCtxSetCurrent(void* context) {
  current = context;
  return 0;
}
int cuLaunchKernelEx(const Config* config, void* function, void** parameters, void**) {
  std::unique_lock<std::mutex> held(lock);
  if (num_launches == refuse_at) return 719;
  Seen& now = seen[num_launches++];
  now = {function,        config->stream,  current, config->grid_x, config->grid_y,
         config->block_x, config->grid_z, 0,       num_launches,   0};
  for (unsigned i = 0; i < config->num_attributes; ++i) {
    const unsigned char* attribute = config->attributes + 72 * i;
    unsigned id;
    std::memcpy(&id, attribute, sizeof id);
    if (id == 2) std::memcpy(&now.is_cooperative, attribute + 8, sizeof(int));
  }
  std::memcpy(&now.first, parameters[0], sizeof now.first);
  held.unlock();
  std::this_thread::sleep_for(std::chrono::milliseconds(pause_ms));
  return 0;
}
int cuGetErrorString(int result, const char** text) {
  *text = result == 719 ? "unspecified launch failure" : "invalid device ordinal";
  return 0;
}

}  // extern "C"
