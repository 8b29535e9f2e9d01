// The CUDA runtime, implemented with host memory and threads. See [Note: fake CUDA] in fake.h.

#include "fake.h"

#include <cxxabi.h>
#include <dlfcn.h>
#include <execinfo.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <sstream>
#include <thread>
#include <utility>

namespace fake {

using Clock = std::chrono::steady_clock;
using Lock = std::unique_lock<std::mutex>;

constexpr int kMaxDevices = 16;
constexpr size_t kSpan = size_t{32} << 30;       // bytes of address space per device
constexpr size_t kAlign = 4096;                  // a page, whose protection can change
constexpr int64_t kCapacity = int64_t{8} << 30;  // bytes of a device
constexpr size_t kMaxQueued = 1024;
constexpr int kPoison = 0xFF;  // NaN in every floating type, -1 in integers

// ---------------------------------------------------------------- settings, counters and the trace

struct Settings {
  std::atomic<uint64_t> seed{0};
  std::atomic<int64_t> kernel_us{0}, copy_us{0};
  std::atomic<bool> is_tracing{false}, has_stacks{false};
};

struct Counters {
  std::map<std::string, int64_t> by_name, syncs;
  std::vector<std::pair<std::string, std::string>> stacks;  // kind and Python stack of host waits
};

struct Record {
  std::string kind;
  int device;
  int64_t stream;  // -1 if none
  std::string name;
  uint64_t event, version;
  std::vector<Range> reads, writes;
  uint64_t thread;
  std::string stack;
};

// These globals are never destroyed, because stream threads may use them while the process exits.
Settings& settings = *new Settings;
std::mutex& counters_mutex = *new std::mutex;
std::vector<Counters>& counters = *new std::vector<Counters>(kMaxDevices);
std::mutex& trace_mutex = *new std::mutex;
std::vector<Record>& trace = *new std::vector<Record>;
std::atomic<uint64_t> next_id{1};
std::string (*stack_source)() = nullptr;
thread_local int current_device = 0;
thread_local cudaError_t last_error = cudaSuccess;
thread_local const char* waiting = nullptr;  // kind of this thread's `Waiting`, if there is one
std::array<std::atomic<bool>, kMaxDevices>& has_context =
    *new std::array<std::atomic<bool>, kMaxDevices>;

// Returns the devices in CUDA_VISIBLE_DEVICES. As in CUDA, an invalid entry ends the list.
std::vector<int> find_devices() {
  const char* limit = getenv("FAKE_CUDA_DEVICES");
  int most = std::min(kMaxDevices, limit ? atoi(limit) : 8);
  std::vector<int> found;
  const char* visible = getenv("CUDA_VISIBLE_DEVICES");
  if (!visible) {
    for (int i = 0; i < most; i++) found.push_back(i);
    return found;
  }
  std::stringstream text(visible);
  std::string entry;
  while (std::getline(text, entry, ',')) {
    char* end;
    long index = strtol(entry.c_str(), &end, 10);
    if (end == entry.c_str() || index < 0 || index >= most) break;
    found.push_back(static_cast<int>(index));
  }
  return found;
}
const std::vector<int>& devices = *new std::vector<int>(find_devices());

uint64_t thread_number() {
  static std::atomic<uint64_t> next{1};
  thread_local uint64_t number = next++;
  return number;
}

cudaError_t failed(cudaError_t error) { return last_error = error; }

Waiting::Waiting(const char* kind) : outer(waiting) { waiting = kind; }
Waiting::~Waiting() { waiting = outer; }

void set_stack_source(std::string (*source)()) { stack_source = source; }

std::string python_stack() { return stack_source ? stack_source() : ""; }

uint64_t mixed(uint64_t x) {
  x += 0x9E3779B97F4A7C15ull;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
  return x ^ (x >> 31);
}

void record(Record made) {
  if (!settings.is_tracing) return;
  made.thread = thread_number();
  Lock lock(trace_mutex);
  trace.push_back(std::move(made));
}

// Callers must hold no lock: reading the stack waits for the GIL, whose holder may need the lock.
void record_wait(const char* kind, int device, int64_t stream, uint64_t event = 0,
                 uint64_t version = 0, const char* name = "") {
  if (!settings.is_tracing) return;
  record({kind, device, stream, name, event, version, {}, {}, 0, python_stack()});
}

void count_sync(const char* kind, int device, bool has_stack = true) {
  std::string stack = has_stack && settings.has_stacks ? python_stack() : "";
  Lock lock(counters_mutex);
  counters[device].syncs[kind]++;
  if (!stack.empty()) counters[device].stacks.emplace_back(kind, stack);
}

// The code that queries an event. A completed query orders its thread after the event if the code
// is Python or torch's allocator of pinned memory, which then reuses a block. torch's allocator of
// device memory reuses blocks in stream order, and NCCL's watchdog reuses none. No stack may be
// read under an allocator's lock.
enum class Caller { python, pinned_memory, other };

__attribute__((noinline)) Caller find_caller() {
  void* frames[4];  // this function, cudaEventQuery, its caller, and the caller's caller
  int num = backtrace(frames, 4);
  auto is_in = [&](int frame, const char* library) {
    Dl_info found;
    return frame < num && dladdr(frames[frame], &found) && strstr(found.dli_fname, library);
  };
  if (is_in(2, "libc10_cuda") && is_in(3, "libc10_cuda")) return Caller::other;
  if (!is_in(2, "libtorch_cuda")) return Caller::python;
  char thread[16] = "";
  pthread_getname_np(pthread_self(), thread, sizeof thread);
  return strncmp(thread, "pt_nccl", 7) == 0 ? Caller::other : Caller::pinned_memory;
}

std::mutex& errors_mutex = *new std::mutex;
std::vector<std::string>& errors = *new std::vector<std::string>(kMaxDevices);

cudaError_t error_of(int device) {
  Lock lock(errors_mutex);
  return errors[device].empty() ? cudaSuccess : failed(cudaErrorLaunchFailure);
}

// ----------------------------------------------------------------------------------------- streams

// Holds back the kernels, or the copies, of all streams.
struct Holds {
  std::mutex mutex;
  std::condition_variable changed;
  std::array<bool, 2> are_held{};

  void set(bool is_copy, bool is_held) {
    Lock lock(mutex);
    are_held[is_copy] = is_held;
    changed.notify_all();
  }

  void wait(bool is_copy) {
    Lock lock(mutex);
    changed.wait(lock, [&] { return !are_held[is_copy]; });
  }
};
Holds& holds = *new Holds;

struct Stream {
  int device, priority;
  int64_t id;
  std::mutex mutex;
  std::condition_variable arrived, finished;
  std::deque<Job> jobs;
  uint64_t num_enqueued = 0, num_done = 0;
  bool is_started = false;

  Stream(int device, int64_t id, int priority) : device(device), priority(priority), id(id) {}

  void enqueue(Job job) {
    Lock lock(mutex);
    if (!is_started) {
      is_started = true;
      std::thread([this] { serve(); }).detach();
    }
    if (job.kind != Kind::silent) finished.wait(lock, [&] { return jobs.size() < kMaxQueued; });
    jobs.push_back(std::move(job));
    num_enqueued++;
    arrived.notify_one();
  }

  bool is_idle() {
    Lock lock(mutex);
    return num_done == num_enqueued;
  }

  void wait() {  // waits for the jobs enqueued so far
    Lock lock(mutex);
    uint64_t target = num_enqueued;
    finished.wait(lock, [&] { return num_done >= target; });
  }

 private:
  void delay(const Job& job, uint64_t index) {
    if (job.kind == Kind::silent) return;
    bool is_copy = job.kind == Kind::copy;
    holds.wait(is_copy);
    int64_t most = is_copy ? settings.copy_us : settings.kernel_us;
    if (most <= 0) return;
    uint64_t place = uint64_t(devices[device]) << 32 ^ uint64_t(id);
    uint64_t bits = mixed(mixed(mixed(settings.seed) ^ place) ^ index);
    std::this_thread::sleep_for(std::chrono::microseconds(bits % (uint64_t(most) + 1)));
  }

  void serve() {
    current_device = device;
    for (uint64_t index = 0;; index++) {
      Job job;
      {
        Lock lock(mutex);
        arrived.wait(lock, [&] { return !jobs.empty(); });
        job = std::move(jobs.front());
        jobs.pop_front();
      }
      delay(job, index);
      try {
        job.run();
      } catch (const std::exception& error) {
        Lock lock(errors_mutex);
        if (errors[device].empty()) errors[device] = job.name + " failed: " + error.what();
        fprintf(stderr, "fake CUDA: %s failed: %s\n", job.name.c_str(), error.what());
      }
      job.run = nullptr;
      Lock lock(mutex);
      num_done++;
      finished.notify_all();
    }
  }
};

struct DeviceStreams {
  std::mutex mutex;
  std::vector<std::unique_ptr<Stream>> all;  // the first is the default stream

  Stream& make(int device, int priority) {
    Lock lock(mutex);
    all.push_back(std::make_unique<Stream>(device, static_cast<int64_t>(all.size()), priority));
    return *all.back();
  }

  Stream& default_stream(int device) {
    {
      Lock lock(mutex);
      if (!all.empty()) return *all.front();
    }
    return make(device, 0);
  }

  std::vector<Stream*> list() {
    Lock lock(mutex);
    std::vector<Stream*> found;
    for (auto& stream : all) found.push_back(stream.get());
    return found;
  }
};
std::vector<DeviceStreams>& device_streams = *new std::vector<DeviceStreams>(kMaxDevices);

Stream& state_of(cudaStream_t stream) {
  if (reinterpret_cast<uintptr_t>(stream) > 2) return *reinterpret_cast<Stream*>(stream);
  has_context[current_device] = true;
  return device_streams[current_device].default_stream(current_device);
}

int device_of_stream(cudaStream_t stream) { return state_of(stream).device; }

void submit(cudaStream_t stream, Job job) {
  Stream& state = state_of(stream);
  if (job.kind != Kind::silent) {
    {
      Lock lock(counters_mutex);
      counters[state.device].by_name[job.name]++;
    }
    record({"launch", state.device, state.id, job.name, 0, 0, job.reads, job.writes});
  }
  state.enqueue(std::move(job));
}

cudaError_t synchronize(cudaStream_t stream, const char* why) {
  if (waiting) why = waiting;
  Stream& state = state_of(stream);
  count_sync(why, state.device);
  state.wait();
  record_wait("stream_synchronize", state.device, state.id, 0, 0,
              strcmp(why, "stream") == 0 ? "" : why);
  return error_of(state.device);
}

void note(const char* kind, cudaStream_t stream, const std::string& name, std::vector<Range> reads,
          std::vector<Range> writes) {
  if (!settings.is_tracing) return;
  Stream& state = state_of(stream);
  bool has_stack = strcmp(kind, "record_stream") == 0;
  record({kind, state.device, state.id, name, 0, 0, std::move(reads), std::move(writes), 0,
          has_stack ? python_stack() : ""});
}

void synchronize_device(int device) {
  for (auto* stream : device_streams[device].list()) stream->wait();
}

// ------------------------------------------------------------------------------------------ events

struct Event {
  int home;  // the device that was current at its creation
  bool has_timing;
  uint64_t id = next_id++;
  std::mutex mutex;
  std::condition_variable fired;
  uint64_t recorded = 0, done = 0;  // the latest version recorded, and completed
  Clock::time_point time;

  void fire(uint64_t version) {
    Lock lock(mutex);
    if (version > done) {
      done = version;
      time = Clock::now();
    }
    fired.notify_all();
  }
  void wait(uint64_t version) {
    Lock lock(mutex);
    fired.wait(lock, [&] { return done >= version; });
  }
};
using EventPtr = std::shared_ptr<Event>;  // jobs may use an event after cudaEventDestroy

EventPtr& event_of(cudaEvent_t event) { return *reinterpret_cast<EventPtr*>(event); }

void record_event(const EventPtr& event, Stream& stream) {
  uint64_t version;
  {
    Lock lock(event->mutex);
    version = ++event->recorded;
  }
  record({"event_record", stream.device, stream.id, "", event->id, version});
  stream.enqueue({"event", Kind::silent, {}, {}, [event, version] { event->fire(version); }});
}

// ------------------------------------------------------------------------------------------ memory

struct Arena {  // memory of all devices. See [Note: fake CUDA]
  char* front = nullptr;
  char* shadow = nullptr;
};
Arena& arena = *new Arena;
struct sigaction former_action;

bool is_front(const void* address) {
  auto* p = static_cast<const char*>(address);
  return arena.front && p >= arena.front && p < arena.front + kSpan * kMaxDevices;
}

int device_of(const void* front) {
  return static_cast<int>((static_cast<const char*>(front) - arena.front) / kSpan);
}

void* shadow_of(const void* address) {
  if (!is_front(address)) return const_cast<void*>(address);  // host memory
  return arena.shadow + (static_cast<const char*>(address) - arena.front);
}

void on_fault(int signal, siginfo_t* info, void*) {
  auto* address = static_cast<char*>(info->si_addr);
  bool is_freed =
      arena.shadow && address >= arena.shadow && address < arena.shadow + kSpan * kMaxDevices;
  if (is_front(address) || is_freed) {
    char text[200];
    const char* said = is_freed ? "a job touched freed memory of cuda:%d at %p.\n"
                                : "the host touched memory of cuda:%d at %p. Copy it to the host "
                                  "first (tensor.cpu()).\n";
    size_t at = address - (is_freed ? arena.shadow : arena.front);
    int size = snprintf(text, sizeof text, "\nfake CUDA: ");
    size += snprintf(text + size, sizeof text - size, said, static_cast<int>(at / kSpan), address);
    if (write(STDERR_FILENO, text, size) < 0) _exit(139);
  }
  sigaction(signal, &former_action, nullptr);  // handles the retried access
}

void map_memory() {
  static std::once_flag once;
  std::call_once(once, [] {
    int file = memfd_create("fake CUDA", MFD_CLOEXEC);
    size_t size = kSpan * kMaxDevices;
    if (file < 0 || ftruncate(file, static_cast<off_t>(size)) != 0) abort();
    auto map = [&](int protection) {
      void* base = mmap(nullptr, size, protection, MAP_SHARED | MAP_NORESERVE, file, 0);
      if (base == MAP_FAILED) abort();
      return static_cast<char*>(base);
    };
    arena.shadow = map(PROT_NONE);  // `allocate` gives access to a block
    arena.front = map(PROT_NONE);
    close(file);
    struct sigaction action{};
    action.sa_sigaction = on_fault;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigaction(SIGSEGV, &action, &former_action);
  });
}

std::mutex& memory_mutex = *new std::mutex;
std::map<char*, size_t>& blocks = *new std::map<char*, size_t>;  // front address and size of each
std::array<std::multimap<size_t, char*>, kMaxDevices>& freed =
    *new std::array<std::multimap<size_t, char*>, kMaxDevices>;
std::array<size_t, kMaxDevices>& tops = *new std::array<size_t, kMaxDevices>{};
std::array<int64_t, kMaxDevices>& used_bytes = *new std::array<int64_t, kMaxDevices>{};
std::map<char*, size_t>& pinned = *new std::map<char*, size_t>;

bool is_pinned(const void* address) {
  Lock lock(memory_mutex);
  auto* p = static_cast<char*>(const_cast<void*>(address));
  auto it = pinned.upper_bound(p);
  return it != pinned.begin() && p < (--it)->first + it->second;
}

void poison(cudaStream_t stream, void* front, size_t size) {
  void* data = shadow_of(front);
  submit(stream, {"poison", Kind::silent, {}, {}, [=] { memset(data, kPoison, size); }});
}

Range range_of(const void* address, size_t size) {
  auto begin = reinterpret_cast<uintptr_t>(address);
  return {begin, begin + size};
}

// Reuses only freed blocks of equal size: torch's allocator requests segments of few sizes.
cudaError_t allocate(void** found, size_t size) {
  map_memory();
  int device = current_device;
  if (cudaError_t error = error_of(device)) return error;
  size = (size + kAlign - 1) / kAlign * kAlign;
  Lock lock(memory_mutex);
  if (used_bytes[device] + static_cast<int64_t>(size) > kCapacity)
    return failed(cudaErrorMemoryAllocation);
  char* data;
  auto old = freed[device].find(size);
  if (old != freed[device].end()) {
    data = old->second;
    freed[device].erase(old);
  } else {
    if (tops[device] == 0) tops[device] = kAlign;  // offset 0 of a device stays unused
    if (tops[device] + size > kSpan) return failed(cudaErrorMemoryAllocation);
    data = arena.front + device * kSpan + tops[device];
    tops[device] += size;
  }
  blocks[data] = size;
  used_bytes[device] += static_cast<int64_t>(size);
  if (mprotect(shadow_of(data), size, PROT_READ | PROT_WRITE) != 0) abort();
  memset(shadow_of(data), kPoison, size);
  *found = data;
  return cudaSuccess;
}

cudaError_t release(void* front) {
  int device = device_of(front);
  synchronize_device(device);  // as cudaFree does
  Lock lock(memory_mutex);
  auto it = blocks.find(static_cast<char*>(front));
  if (it == blocks.end()) return failed(cudaErrorInvalidValue);
  madvise(shadow_of(front), it->second, MADV_REMOVE);
  mprotect(shadow_of(front), it->second, PROT_NONE);  // `on_fault` reports later uses
  freed[device].emplace(it->second, it->first);
  used_bytes[device] -= static_cast<int64_t>(it->second);
  blocks.erase(it);
  return error_of(device);
}

// As in CUDA, pinned memory is accessed later. Pageable source memory is read at once, and the host
// waits for a copy to pageable memory.
cudaError_t copy(void* target, const void* source, size_t size, cudaStream_t stream) {
  if (size == 0) return cudaSuccess;
  if (cudaError_t error = error_of(device_of_stream(stream))) return error;
  bool is_up = !is_front(source), is_down = !is_front(target);
  std::string name = is_up ? "copy up" : is_down ? "copy down" : "copy";
  Job job{name, Kind::copy, {range_of(source, size)}, {range_of(target, size)}, {}};
  void* to = shadow_of(target);
  if (is_up && !is_pinned(source)) {
    auto staged = std::make_shared<std::vector<char>>(static_cast<const char*>(source),
                                                      static_cast<const char*>(source) + size);
    if (!waiting) count_sync("staged copy", state_of(stream).device);
    job.reads.clear();
    job.run = [=] { memcpy(to, staged->data(), size); };
    submit(stream, std::move(job));
    return cudaSuccess;
  }
  const void* from = shadow_of(source);
  job.run = [=] { memmove(to, from, size); };
  submit(stream, std::move(job));
  bool should_wait = is_down && !is_pinned(target) && !waiting;  // in a `Waiting`, torch waits
  return should_wait ? synchronize(stream, "copy") : cudaSuccess;
}

// ------------------------------------------------------------------------------- torch's operators

// Loads libfake_cuda_ops, which needs torch's libraries, when torch first counts the devices.
void load_operators() {
  static std::once_flag once;
  std::call_once(once, [] {
    if (!dlsym(RTLD_DEFAULT, "_ZN3c1010Dispatcher13realSingletonEv")) return;  // torch isn't loaded
    Dl_info own;
    dladdr(reinterpret_cast<void*>(&load_operators), &own);
    std::string path(own.dli_fname);
    path = path.substr(0, path.rfind('/')) + "/libfake_cuda_ops.so";
    if (!dlopen(path.c_str(), RTLD_NOW | RTLD_GLOBAL)) {
      fprintf(stderr, "fake CUDA: %s\n", dlerror());
      abort();
    }
  });
}

std::map<const void*, std::string>& kernels = *new std::map<const void*, std::string>;

cudaError_t refuse_kernel(const void* function) {
  auto known = kernels.find(function);
  std::string name = known == kernels.end() ? "unknown" : known->second;
  int status;
  if (char* plain = abi::__cxa_demangle(name.c_str(), nullptr, nullptr, &status)) name = plain;
  fprintf(stderr, "fake CUDA: no stand-in for the kernel %.300s\n", name.c_str());
  return failed(cudaErrorInvalidDeviceFunction);
}

int unsupported() { return 801; }  // CUDA_ERROR_NOT_SUPPORTED

// ---------------------------------------------------------------------- functions for __init__.py

std::string quoted(const std::string& text) {
  std::string found = "\"";
  for (char c : text) {
    if (c == '"' || c == '\\') found += '\\';
    if (c == '\n') {
      found += "\\n";
    } else if (static_cast<unsigned char>(c) >= 0x20) {
      found += c;
    }
  }
  return found + "\"";
}

template <typename Items, typename F>
std::string joined(const Items& items, F f) {
  std::string text;
  for (auto& item : items) text += (text.empty() ? "" : ",") + f(item);
  return text;
}

std::string object(const std::map<std::string, int64_t>& values) {
  return "{" +
         joined(values,
                [](auto& item) { return quoted(item.first) + ":" + std::to_string(item.second); }) +
         "}";
}

const char* kept(std::string text) {
  thread_local std::string last;
  last = std::move(text);
  return last.c_str();
}

}  // namespace fake

using namespace fake;

extern "C" {

void fake_set_delays(uint64_t seed, int64_t kernel_us, int64_t copy_us) {
  settings.seed = seed;
  settings.kernel_us = kernel_us;
  settings.copy_us = copy_us;
}
void fake_hold(int is_copy, int is_held) { holds.set(is_copy, is_held); }

void fake_reset_counters(int has_stacks) {
  Lock lock(counters_mutex);
  for (auto& own : counters) own = {};
  settings.has_stacks = has_stacks;
}

const char* fake_counters(int device) {
  Lock lock(counters_mutex);
  auto& own = counters[device];
  auto pair = [](auto& item) { return "[" + quoted(item.first) + "," + quoted(item.second) + "]"; };
  return kept("{\"by_name\":" + object(own.by_name) + ",\"syncs\":" + object(own.syncs) +
              ",\"stacks\":[" + joined(own.stacks, pair) + "]}");
}

void fake_set_tracing(int is_on) {
  Lock lock(trace_mutex);
  if (is_on) trace.clear();
  settings.is_tracing = is_on;
}

const char* fake_trace() {
  Lock lock(trace_mutex);
  auto ranges = [](const std::vector<Range>& all) {
    return "[" +
           joined(all,
                  [](auto& range) {
                    return "[" + std::to_string(range.begin) + "," + std::to_string(range.end) +
                           "]";
                  }) +
           "]";
  };
  return kept("[" +
              joined(trace,
                     [&](auto& each) {
                       std::ostringstream text;
                       text << "[" << quoted(each.kind) << "," << each.device << "," << each.stream
                            << "," << quoted(each.name) << "," << each.event << "," << each.version
                            << "," << ranges(each.reads) << "," << ranges(each.writes) << ","
                            << each.thread << "," << quoted(each.stack) << "]";
                       return text.str();
                     }) +
              "]");
}

// Records that a host thread accesses memory without torch, or hands an object to another thread.
void fake_note_host(const char* kind, const char* name, uint64_t id, const uintptr_t* bounds,
                    int num_reads, int num_writes) {
  std::vector<Range> reads, writes;
  for (int i = 0; i < num_reads + num_writes; i++)
    (i < num_reads ? reads : writes).push_back({bounds[2 * i], bounds[2 * i + 1]});
  record({kind, -1, -1, name, id, 0, std::move(reads), std::move(writes)});
}

uint64_t fake_contexts() {  // one bit per device
  uint64_t found = 0;
  for (int i = 0; i < kMaxDevices; i++) found |= uint64_t(has_context[i]) << i;
  return found;
}
void fake_forget_contexts() {
  for (auto& context : has_context) context = false;
}

// ---------------------------------------------------------------------------- the runtime: devices

cudaError_t cudaGetDeviceCount(int* count) {
  load_operators();
  *count = static_cast<int>(devices.size());
  return devices.empty() ? failed(cudaErrorNoDevice) : cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) {
  *device = current_device;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= static_cast<int>(devices.size()))
    return failed(cudaErrorInvalidDevice);
  current_device = device;
  has_context[device] = true;
  return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int device) {
  *p = {};
  snprintf(p->name, sizeof p->name, "FAKE H100 %d", devices[device]);
  p->uuid.bytes[0] = static_cast<char>(devices[device] + 1);
  p->major = 9;
  p->multiProcessorCount = 132;
  p->totalGlobalMem = kCapacity;
  p->warpSize = 32;
  p->maxThreadsPerBlock = 1024;
  p->maxThreadsPerMultiProcessor = 2048;
  p->sharedMemPerBlock = 49152;
  p->sharedMemPerBlockOptin = 232448;
  p->regsPerMultiprocessor = 65536;
  p->maxGridSize[0] = 2147483647;
  p->maxGridSize[1] = p->maxGridSize[2] = 65535;
  p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024;
  p->maxThreadsDim[2] = 64;
  p->l2CacheSize = 50 << 20;
  p->maxBlocksPerMultiProcessor = 32;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  static const std::map<cudaDeviceAttr, int> known{{cudaDevAttrMultiProcessorCount, 132},
                                                   {cudaDevAttrComputeCapabilityMajor, 9},
                                                   {cudaDevAttrComputeCapabilityMinor, 0},
                                                   {cudaDevAttrWarpSize, 32},
                                                   {cudaDevAttrMaxThreadsPerBlock, 1024}};
  auto it = known.find(attribute);
  *value = it == known.end() ? 0 : it->second;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetPCIBusId(char* text, int size, int device) {
  snprintf(text, size, "0000:%02x:00.0", devices[device] + 1);
  return cudaSuccess;
}
cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) {
  *can = 1;
  return cudaSuccess;
}
cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return cudaSuccess; }
cudaError_t cudaDeviceSynchronize() {
  count_sync("device", current_device);
  synchronize_device(current_device);
  record_wait("device_synchronize", current_device, -1);
  return error_of(current_device);
}
cudaError_t cudaGetLastError() {
  cudaError_t error = error_of(current_device);
  return error ? error : std::exchange(last_error, cudaSuccess);
}
cudaError_t cudaPeekAtLastError() {
  cudaError_t error = error_of(current_device);
  return error ? error : last_error;
}
const char* cudaGetErrorName(cudaError_t error) {
  return error == cudaErrorMemoryAllocation ? "cudaErrorMemoryAllocation" : "fakeCudaError";
}
const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaErrorMemoryAllocation:
      return "out of memory";
    case cudaErrorInvalidDevice:
      return "invalid device ordinal";
    case cudaErrorNoDevice:
      return "no CUDA-capable device is detected";
    case cudaErrorInvalidResourceHandle:
      return "invalid resource handle";
    case cudaErrorInvalidDeviceFunction:
      return "this kernel has no stand-in in the fake CUDA (its name is on stderr)";
    case cudaErrorLaunchFailure: {
      Lock lock(errors_mutex);
      return kept(errors[current_device]);
    }
    default:
      return kept("fake CUDA error " + std::to_string(static_cast<int>(error)));
  }
}

// ------------------------------------------------------------------------- the runtime: memory

cudaError_t cudaMalloc(void** data, size_t size) {
  has_context[current_device] = true;
  return allocate(data, size);
}
cudaError_t cudaFree(void* data) {
  has_context[current_device] = true;
  return data ? release(data) : error_of(current_device);
}
cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  Lock lock(memory_mutex);
  *total = kCapacity;
  *free = static_cast<size_t>(kCapacity - used_bytes[current_device]);
  return cudaSuccess;
}
cudaError_t cudaHostAlloc(void** data, size_t size, unsigned) {
  *data = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (*data == MAP_FAILED) return failed(cudaErrorMemoryAllocation);
  memset(*data, kPoison, size);
  record({"pinned_alloc", -1, -1, "", 0, 0, {}, {range_of(*data, size)}});
  Lock lock(memory_mutex);
  pinned[static_cast<char*>(*data)] = size;
  return error_of(current_device);
}
cudaError_t cudaFreeHost(void* data) {
  Lock lock(memory_mutex);
  auto it = pinned.find(static_cast<char*>(data));
  if (it == pinned.end()) return failed(cudaErrorInvalidValue);
  munmap(data, it->second);
  pinned.erase(it);
  return cudaSuccess;
}
cudaError_t cudaHostRegister(void* data, size_t size, unsigned) {
  Lock lock(memory_mutex);
  bool is_new = pinned.emplace(static_cast<char*>(data), size).second;
  return is_new ? cudaSuccess : failed(cudaErrorHostMemoryAlreadyRegistered);
}
cudaError_t cudaHostUnregister(void* data) {
  Lock lock(memory_mutex);
  bool was_known = pinned.erase(static_cast<char*>(data)) == 1;
  return was_known ? cudaSuccess : failed(cudaErrorHostMemoryNotRegistered);
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* found, const void* address) {
  *found = {};
  found->device = -2;
  found->type = cudaMemoryTypeUnregistered;
  found->devicePointer = found->hostPointer = const_cast<void*>(address);
  if (is_front(address)) {
    found->type = cudaMemoryTypeDevice;
    found->device = device_of(address);
    found->hostPointer = nullptr;
  } else if (is_pinned(address)) {
    found->type = cudaMemoryTypeHost;
    found->device = current_device;
  }
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* target, const void* source, size_t size, cudaMemcpyKind,
                            cudaStream_t stream) {
  return copy(target, source, size, stream);
}
cudaError_t cudaMemcpyPeerAsync(void* target, int, const void* source, int, size_t size,
                                cudaStream_t stream) {
  return copy(target, source, size, stream);
}
cudaError_t cudaMemcpy(void* target, const void* source, size_t size, cudaMemcpyKind) {
  copy(target, source, size, nullptr);
  return synchronize(nullptr, "copy");
}
cudaError_t cudaMemsetAsync(void* target, int value, size_t size, cudaStream_t stream) {
  void* to = shadow_of(target);
  submit(stream,
         {"memset", Kind::kernel, {}, {range_of(target, size)}, [=] { memset(to, value, size); }});
  return error_of(device_of_stream(stream));
}
cudaError_t cudaMemset(void* target, int value, size_t size) {
  return cudaMemsetAsync(target, value, size, nullptr);
}

// ----------------------------------------------------------------- the runtime: streams and events

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int priority) {
  has_context[current_device] = true;
  device_streams[current_device].default_stream(current_device);
  *stream = reinterpret_cast<cudaStream_t>(
      &device_streams[current_device].make(current_device, priority));
  return error_of(current_device);
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  return cudaStreamCreateWithPriority(stream, flags, 0);
}
cudaError_t cudaStreamCreate(cudaStream_t* stream) {
  return cudaStreamCreateWithPriority(stream, 0, 0);
}
cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamGetPriority(cudaStream_t stream, int* priority) {
  *priority = state_of(stream).priority;
  return cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) { return synchronize(stream, "stream"); }
cudaError_t cudaStreamQuery(cudaStream_t stream) {
  Stream& state = state_of(stream);
  if (!state.is_idle()) return failed(cudaErrorNotReady);
  record_wait("stream_query", state.device, state.id);
  return error_of(state.device);
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  bool has_timing = !(flags & cudaEventDisableTiming);
  *event = reinterpret_cast<cudaEvent_t>(
      new EventPtr(std::make_shared<Event>(current_device, has_timing)));
  return error_of(current_device);
}
cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete &event_of(event);
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  Stream& state = state_of(stream);
  if (event_of(event)->home != state.device) return failed(cudaErrorInvalidResourceHandle);
  record_event(event_of(event), state);
  return error_of(state.device);
}
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) {
  return cudaEventRecord(event, stream);
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  EventPtr known = event_of(event);
  Stream& state = state_of(stream);
  uint64_t version;
  {
    Lock lock(known->mutex);
    version = known->recorded;
  }
  record_wait("event_wait", state.device, state.id, known->id, version);
  if (version > 0)
    state.enqueue({"wait", Kind::silent, {}, {}, [known, version] { known->wait(version); }});
  return error_of(state.device);
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
  auto& known = event_of(event);
  uint64_t version;
  {
    Lock lock(known->mutex);
    version = known->recorded;
    if (known->done < version) return failed(cudaErrorNotReady);
  }
  Caller caller = settings.is_tracing ? find_caller() : Caller::other;
  if (caller == Caller::python) record_wait("event_query", known->home, -1, known->id, version);
  if (caller == Caller::pinned_memory)
    record({"event_query", known->home, -1, "", known->id, version});
  return error_of(known->home);
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  auto& known = event_of(event);
  uint64_t version;
  {
    Lock lock(known->mutex);
    version = known->recorded;
  }
  bool has_stack = find_caller() != Caller::other;
  count_sync("event", known->home, has_stack);
  known->wait(version);
  if (has_stack) record_wait("event_synchronize", known->home, -1, known->id, version);
  return error_of(known->home);
}
cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t start, cudaEvent_t end) {
  auto &first = event_of(start), &last = event_of(end);
  Lock first_lock(first->mutex, std::defer_lock), last_lock(last->mutex, std::defer_lock);
  first == last ? first_lock.lock() : std::lock(first_lock, last_lock);
  bool are_timed = first->has_timing && last->has_timing && first->recorded && last->recorded;
  if (!are_timed || first->home != last->home) return failed(cudaErrorInvalidResourceHandle);
  if (first->done < first->recorded || last->done < last->recorded)
    return failed(cudaErrorNotReady);
  *ms = std::chrono::duration<float, std::milli>(last->time - first->time).count();
  return cudaSuccess;
}
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* data) {
  submit(stream, {"host function", Kind::silent, {}, {}, [=] { function(data); }});
  return error_of(device_of_stream(stream));
}
cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t function, void* data,
                                  unsigned) {
  submit(stream, {"callback", Kind::silent, {}, {}, [=] { function(stream, cudaSuccess, data); }});
  return cudaSuccess;
}

// ------------------------------------------------------------------------- the runtime: kernels

cudaError_t cudaLaunchKernel(const void* function, dim3, dim3, void**, size_t, cudaStream_t) {
  return refuse_kernel(function);
}
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3, dim3, void**, size_t, cudaStream_t) {
  return refuse_kernel(kernel);
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t*, const void* function, void**) {
  return refuse_kernel(function);
}
cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void*>(function));
  return cudaSuccess;
}
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* found, const void*) {
  *found = {};
  found->maxThreadsPerBlock = 1024;
  found->numRegs = 32;
  found->binaryVersion = found->ptxVersion = 90;
  return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* num, const void*, int,
                                                                   size_t, unsigned) {
  *num = 4;
  return cudaSuccess;
}
cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned,
                                             unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
  void* driver = dlopen("libcuda.so.1", RTLD_NOW);
  *function = driver ? dlsym(driver, name) : nullptr;
  if (!*function) *function = reinterpret_cast<void*>(&unsupported);
  if (result) *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
cudaError_t cudaProfilerStart() { return cudaSuccess; }
cudaError_t cudaProfilerStop() { return cudaSuccess; }
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }

void** __cudaRegisterFatBinary(void*) { return static_cast<void**>(calloc(1, 64)); }
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
char __cudaInitModule(void**) { return 0; }
void __cudaRegisterFunction(void**, const char* function, char*, const char* name, int, void*,
                            void*, void*, void*, int*) {
  kernels[function] = name;
}
void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
unsigned __cudaPushCallConfiguration(dim3, dim3, size_t, CUstream_st*) { return 0; }
cudaError_t __cudaPopCallConfiguration(dim3*, dim3*, size_t*, void*) { return cudaSuccess; }
}
