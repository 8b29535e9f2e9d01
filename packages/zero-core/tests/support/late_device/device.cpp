// An accelerator made of threads, for tests: torch's PrivateUse1 device "late".
//
// The docstring of the Python module describes its behaviour. A stream is a thread with a queue. An
// operator is a job that runs the CPU's kernel on device memory. Device memory is mapped twice: the
// host sees inaccessible addresses (the "front"), and jobs use the "shadow" addresses.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/Parallel.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/DispatchStub.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_fused_sdp_choice_cpu_dispatch.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <torch/csrc/profiler/combined_traceback.h>
#include <torch/library.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <set>
#include <sstream>
#include <thread>
#include <unordered_map>
#include <unordered_set>

namespace late {

using at::Tensor;
using c10::Device;
using c10::DeviceIndex;
using c10::IValue;
using c10::StreamId;
using Clock = std::chrono::steady_clock;
using Lock = std::unique_lock<std::mutex>;

constexpr auto kLate = c10::DeviceType::PrivateUse1;
constexpr int kMaxDevices = 16;
constexpr size_t kSpan = size_t{32} << 30;  // bytes of address space per device
constexpr size_t kAlign = 512;
constexpr size_t kSmall = size_t{1} << 20;  // larger requests come from the pool of large blocks
constexpr size_t kSmallSegment = size_t{2} << 20;
constexpr size_t kLargeSegment = size_t{20} << 20;
constexpr size_t kMinLargeAlloc = size_t{10} << 20;
constexpr int kPoolStreams = 32;  // per device and priority, like in CUDA
constexpr size_t kMaxQueued = 1024;
constexpr int kPoison = 0xFF;  // NaN in every floating type, -1 in integers

// ---------------------------------------------------------------- settings, counters and the trace

struct Range {
  uintptr_t begin, end;
};

struct Record {
  std::string kind;
  int device;
  int64_t stream;  // -1: none
  std::string name;
  uint64_t id, version;  // an event's id, and how often it was recorded
  std::vector<Range> reads, writes;
  uint64_t thread;
  std::string stack;  // Python frames that called a wait
};

struct Settings {
  std::atomic<uint64_t> seed{0};
  std::atomic<int64_t> kernel_us{0}, copy_us{0};
  std::atomic<bool> is_tracing{false}, has_stacks{false};
  std::atomic<int> num_devices{4};
  std::atomic<size_t> capacity{size_t{8} << 30};
};

struct Counters {
  int64_t launches = 0, bytes_read = 0, bytes_written = 0;
  std::map<std::string, int64_t> by_op;
  std::map<std::string, int64_t> syncs;
  std::vector<std::pair<std::string, std::string>> stacks;  // synchronisations: kind, stack
};

// These globals are never destroyed, because stream threads may use them until the process ends.
Settings& settings = *new Settings;
std::mutex& counters_mutex = *new std::mutex;
std::vector<Counters>& counters = *new std::vector<Counters>(kMaxDevices);
std::mutex& trace_mutex = *new std::mutex;
std::vector<Record>& trace = *new std::vector<Record>;
std::atomic<uint64_t> next_id{1};

uint64_t thread_number() {
  static std::atomic<uint64_t> next{1};
  thread_local uint64_t number = next++;
  return number;
}

std::string python_stack() {
  auto taken = torch::CapturedTraceback::gather(true, false, false);
  auto known = torch::symbolize({taken.get()});
  std::ostringstream text;
  for (auto index : known.tracebacks.at(0)) {
    auto& frame = known.all_frames.at(index);
    text << frame.filename << ":" << frame.lineno << " " << frame.funcname << "\n";
  }
  return text.str();
}

// Reading the Python stack takes the GIL, so the caller must hold no lock that a thread with the
// GIL may wait for.
std::string stack_of_wait() { return settings.is_tracing ? python_stack() : ""; }

void note(const std::string& kind, int device, int64_t stream, std::string name = "",
          uint64_t id = 0, uint64_t version = 0, std::vector<Range> reads = {},
          std::vector<Range> writes = {}, std::string stack = "") {
  if (!settings.is_tracing) return;
  Lock lock(trace_mutex);
  trace.push_back({kind, device, stream, std::move(name), id, version, std::move(reads),
                   std::move(writes), thread_number(), std::move(stack)});
}

void note_wait(const char* kind, int device, int64_t stream, uint64_t id = 0, uint64_t version = 0,
               const char* name = "") {
  note(kind, device, stream, name, id, version, {}, {}, stack_of_wait());
}

void count_sync(const char* kind, int device) {
  std::string stack = settings.has_stacks ? python_stack() : "";
  Lock lock(counters_mutex);
  counters[device].syncs[kind]++;
  if (!stack.empty()) counters[device].stacks.emplace_back(kind, stack);
}

uint64_t mixed(uint64_t x) {  // splitmix64
  x += 0x9E3779B97F4A7C15ull;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
  return x ^ (x >> 31);
}

// ---------------------------------------------------------------------------------------- contexts

thread_local DeviceIndex current_device = 0;
std::array<std::atomic<bool>, kMaxDevices>& has_context =
    *new std::array<std::atomic<bool>, kMaxDevices>;

void check_device(int64_t index) {
  TORCH_CHECK(index >= 0 && index < settings.num_devices, "late:", index,
              " does not exist: there are ", settings.num_devices.load(), " devices");
}

// Errors of jobs by device, raised when the host synchronises with the device.
std::mutex& errors_mutex = *new std::mutex;
std::vector<std::string>& errors = *new std::vector<std::string>(kMaxDevices);

void raise_errors(int device) {
  std::string found;
  {
    Lock lock(errors_mutex);
    found.swap(errors[device]);
  }
  TORCH_CHECK(found.empty(), "late:", device, ": ", found);
}

// ----------------------------------------------------------------------------------------- streams

// Blocks kernels or copies on all streams until a test releases them.
struct Holds {
  std::mutex mutex;
  std::condition_variable changed;
  std::array<bool, 2> are_held{};  // kernels, copies

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

struct Job {
  std::function<void()> run;
  std::string name;
  enum Kind { KERNEL, COPY, SILENT } kind = KERNEL;
};

struct StreamState {
  int device = 0;
  StreamId id = 0;
  int priority = 0;
  std::mutex mutex;
  std::condition_variable arrived, finished;
  std::deque<Job> jobs;
  uint64_t num_enqueued = 0, num_done = 0;
  bool is_started = false;

  void enqueue(Job job) {
    Lock lock(mutex);
    if (!is_started) {
      is_started = true;
      std::thread([this] { serve(); }).detach();
    }
    if (job.kind != Job::SILENT) finished.wait(lock, [&] { return jobs.size() < kMaxQueued; });
    jobs.push_back(std::move(job));
    num_enqueued++;
    arrived.notify_one();
  }

  bool is_idle() {
    Lock lock(mutex);
    return num_done == num_enqueued;
  }

  void wait() {  // for all jobs enqueued so far
    Lock lock(mutex);
    uint64_t target = num_enqueued;
    finished.wait(lock, [&] { return num_done >= target; });
  }

 private:
  void delay(const Job& job, uint64_t index) {
    if (job.kind == Job::SILENT) return;
    holds.wait(job.kind == Job::COPY);
    int64_t most = job.kind == Job::COPY ? settings.copy_us.load() : settings.kernel_us.load();
    if (most <= 0) return;
    uint64_t bits =
        mixed(mixed(mixed(settings.seed) ^ (uint64_t(device) << 32 ^ uint64_t(id))) ^ index);
    std::this_thread::sleep_for(std::chrono::microseconds(bits % (uint64_t(most) + 1)));
  }

  void fail(const Job& job, const char* what) {
    Lock lock(errors_mutex);
    if (errors[device].empty()) {
      errors[device] = job.name + " on stream " + std::to_string(id) + " failed: " + what;
    }
  }

  void serve() {
    current_device = static_cast<DeviceIndex>(device);
    at::AutoDispatchBelowADInplaceOrView below;  // jobs are kernels: no autograd, no views to track
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
      } catch (const c10::Error& error) {
        fail(job, error.what_without_backtrace());
      } catch (const std::exception& error) {
        fail(job, error.what());
      }
      job.run = nullptr;
      Lock lock(mutex);
      num_done++;
      finished.notify_all();
    }
  }
};

// The streams of a device. Id 0 is the default stream. Other ids encode priority and pool index.
struct DeviceStreams {
  std::mutex mutex;
  std::map<StreamId, std::unique_ptr<StreamState>> streams;
  std::map<int, int> turns;  // number of streams created, by priority

  StreamState& at(int device, StreamId id) {
    Lock lock(mutex);
    auto& stream = streams[id];
    if (!stream) {
      stream = std::make_unique<StreamState>();
      stream->device = device;
      stream->id = id;
      stream->priority = id == 0 ? 0 : -static_cast<int>((id - 1) / kPoolStreams);
      note("stream", device, id, std::to_string(stream->priority));
    }
    return *stream;
  }

  StreamId next(int priority) {
    Lock lock(mutex);
    int level = std::min(std::max(-priority, 0), 5);
    return 1 + level * kPoolStreams + (turns[level]++ % kPoolStreams);
  }

  std::vector<StreamState*> all() {
    Lock lock(mutex);
    std::vector<StreamState*> found;
    for (auto& [id, stream] : streams) found.push_back(stream.get());
    return found;
  }
};

std::vector<DeviceStreams>& device_streams = *new std::vector<DeviceStreams>(kMaxDevices);
thread_local std::array<StreamId, kMaxDevices> current_stream{};

StreamState& state_of(int device, StreamId id) { return device_streams[device].at(device, id); }
StreamState& state_of(const c10::Stream& stream) {
  return state_of(stream.device_index(), stream.id());
}
StreamState& current_of(int device) {
  has_context[device] = true;
  return state_of(device, current_stream[device]);
}

void synchronize_stream(StreamState& stream, const char* why = "") {
  stream.wait();
  note_wait("stream_synchronize", stream.device, stream.id, 0, 0, why);
}

void synchronize_device(int device) {
  for (auto* stream : device_streams[device].all()) stream->wait();
  note_wait("device_synchronize", device, -1);
}

// ------------------------------------------------------------------------------------------ events

struct EventState {
  uint64_t id = next_id++;
  std::mutex mutex;
  std::condition_variable fired;
  uint64_t recorded = 0, done = 0;  // versions
  int device = 0;                   // of the last record
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
  bool is_done() {
    Lock lock(mutex);
    return done >= recorded;
  }
};
using EventPtr = std::shared_ptr<EventState>;

void record_event(const EventPtr& event, StreamState& stream) {
  uint64_t version;
  {
    Lock lock(event->mutex);
    version = ++event->recorded;
    event->device = stream.device;
  }
  note("event_record", stream.device, stream.id, "", event->id, version);
  stream.enqueue({[event, version] { event->fire(version); }, "event", Job::SILENT});
}

void wait_event(const EventPtr& event, StreamState& stream) {
  uint64_t version;
  {
    Lock lock(event->mutex);
    version = event->recorded;
  }
  note_wait("event_wait", stream.device, stream.id, event->id, version);
  if (version == 0) return;
  stream.enqueue({[event, version] { event->wait(version); }, "wait", Job::SILENT});
}

// ------------------------------------------------------------------------------------------ memory

struct Arena {  // device memory, mapped at two addresses
  char* front = nullptr;
  char* shadow = nullptr;
};
Arena& arena = *new Arena;

bool is_front(const void* address) {
  auto* p = static_cast<const char*>(address);
  return arena.front != nullptr && p >= arena.front && p < arena.front + kSpan * kMaxDevices;
}

template <typename T>
T* shadow_of(T* address) {
  if (address == nullptr) return address;
  TORCH_INTERNAL_ASSERT(is_front(address), "late: not an address of the device");
  return reinterpret_cast<T*>(arena.shadow +
                              (reinterpret_cast<const char*>(address) - arena.front));
}

struct sigaction former_action;

void on_fault(int signal, siginfo_t* info, void* context) {
  if (is_front(info->si_addr)) {
    char text[256];
    int size =
        snprintf(text, sizeof(text),
                 "\nlate device: the host touched memory of late:%zu at %p. Copy it to the "
                 "host first (tensor.cpu()).\n",
                 static_cast<size_t>(static_cast<char*>(info->si_addr) - arena.front) / kSpan,
                 info->si_addr);
    if (write(STDERR_FILENO, text, size) < 0) _exit(139);
  }
  sigaction(signal, &former_action, nullptr);  // the repeated access now ends the process
}

void map_memory() {
  int file = memfd_create("late device", MFD_CLOEXEC);
  TORCH_CHECK(file >= 0, "late: memfd_create failed: ", strerror(errno));
  size_t size = kSpan * kMaxDevices;
  TORCH_CHECK(ftruncate(file, static_cast<off_t>(size)) == 0, "late: no room: ", strerror(errno));
  auto map = [&](int protection) {
    void* base = mmap(nullptr, size, protection, MAP_SHARED | MAP_NORESERVE, file, 0);
    TORCH_CHECK(base != MAP_FAILED, "late: mmap failed: ", strerror(errno));
    return static_cast<char*>(base);
  };
  arena.shadow = map(PROT_READ | PROT_WRITE);
  arena.front = map(PROT_NONE);
  close(file);
  struct sigaction action{};
  action.sa_sigaction = on_fault;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigaction(SIGSEGV, &action, &former_action);
}

struct Block {
  int device;
  StreamId stream;  // the allocating stream
  char* data;
  size_t size, requested = 0;
  bool is_large;
  Block *previous = nullptr, *next = nullptr;  // neighbours in the segment
  bool is_used = false;
  std::set<StreamId> users;  // streams passed to record_stream
};

struct BySize {
  bool operator()(const Block* a, const Block* b) const {
    return std::tie(a->size, a->data) < std::tie(b->size, b->data);
  }
};

using Stats = c10::CachingDeviceAllocator::DeviceStats;

void release_block(void* context);

// A small version of CUDA's caching allocator, with a pool per stream and size class. A freed block
// is reusable at once on its allocating stream. After `record_stream` it is reusable when the
// events of its users have fired.
struct LateAllocator final : c10::DeviceAllocator {
  struct PerDevice {
    std::map<std::pair<StreamId, bool>, std::set<Block*, BySize>> free;
    std::deque<std::pair<Block*, std::vector<EventPtr>>> pending;
    std::multimap<size_t, char*> unmapped;  // segments released by empty_cache
    size_t top = kAlign;                    // address 0 of a device stays free
    Stats stats;
  };
  std::recursive_mutex mutex;
  std::vector<PerDevice> devices{kMaxDevices};
  using Guard = std::lock_guard<std::recursive_mutex>;

  static void add(c10::CachingAllocator::StatArray& stat, bool is_large, size_t size) {
    stat[0].increase(size);
    stat[is_large ? 2 : 1].increase(size);
  }
  static void sub(c10::CachingAllocator::StatArray& stat, bool is_large, size_t size) {
    stat[0].decrease(size);
    stat[is_large ? 2 : 1].decrease(size);
  }

  c10::DataPtr allocate(size_t size) override {
    int index = current_device;
    Device device(kLate, static_cast<DeviceIndex>(index));
    if (size == 0) return {nullptr, nullptr, &release_block, device};
    has_context[index] = true;
    StreamState& stream = state_of(index, current_stream[index]);
    Guard guard(mutex);
    Block* block = take(index, stream, size);
    auto begin = reinterpret_cast<uintptr_t>(block->data);
    note("alloc", index, block->stream, "", 0, 0, {}, {{begin, begin + block->size}});
    return {block->data, block, &release_block, device};
  }

  Block* take(int index, StreamState& stream, size_t requested) {
    auto& own = devices[index];
    settle(index, false);
    size_t size = (requested + kAlign - 1) / kAlign * kAlign;
    bool is_large = size > kSmall;
    auto& pool = own.free[{stream.id, is_large}];
    Block probe{index, stream.id, nullptr, size, 0, is_large};
    auto found = pool.lower_bound(&probe);
    Block* block;
    if (found != pool.end()) {
      block = *found;
      pool.erase(found);
    } else {
      block = grow(index, stream, size, is_large);
    }
    size_t rest = block->size - size;
    if (is_large ? rest > kSmall : rest >= kAlign) {
      auto* tail =
          new Block{index, stream.id, block->data + size, rest, 0, is_large, block, block->next};
      if (block->next) block->next->previous = tail;
      block->next = tail;
      block->size = size;
      pool.insert(tail);
    }
    block->is_used = true;
    block->requested = requested;
    block->users.clear();
    add(own.stats.allocation, is_large, 1);
    add(own.stats.active, is_large, 1);
    add(own.stats.allocated_bytes, is_large, block->size);
    add(own.stats.active_bytes, is_large, block->size);
    add(own.stats.requested_bytes, is_large, requested);
    return block;
  }

  Block* grow(int index, StreamState& stream, size_t size, bool is_large) {
    auto& own = devices[index];
    size_t bytes = !is_large ? kSmallSegment
                   : size < kMinLargeAlloc
                       ? kLargeSegment
                       : (size + kSmallSegment - 1) / kSmallSegment * kSmallSegment;
    size_t reserved = own.stats.reserved_bytes[0].current;
    if (reserved + bytes > settings.capacity) {
      emptyCache();
      reserved = own.stats.reserved_bytes[0].current;
    }
    if (reserved + bytes > settings.capacity) {
      own.stats.num_ooms++;
      TORCH_CHECK_WITH(OutOfMemoryError, false, "late:", index, " is out of memory: ", bytes,
                       " bytes were asked for, ", reserved, " of ", settings.capacity.load(),
                       " are reserved, ", own.stats.allocated_bytes[0].current, " allocated");
    }
    char* data;
    auto old = own.unmapped.lower_bound(bytes);
    if (old != own.unmapped.end() && old->first == bytes) {
      data = old->second;
      own.unmapped.erase(old);
    } else {
      TORCH_CHECK_WITH(OutOfMemoryError, own.top + bytes <= kSpan, "late: addresses are used up");
      data = arena.front + index * kSpan + own.top;
      own.top += bytes;
    }
    memset(shadow_of(data), kPoison, bytes);
    add(own.stats.segment, is_large, 1);
    add(own.stats.reserved_bytes, is_large, bytes);
    own.stats.num_device_alloc++;
    return new Block{index, stream.id, data, bytes, 0, is_large};
  }

  void free(Block* block) {
    Guard guard(mutex);
    auto& own = devices[block->device];
    auto begin = reinterpret_cast<uintptr_t>(block->data);
    note("free", block->device, block->stream, "", 0, 0, {}, {{begin, begin + block->size}});
    sub(own.stats.allocation, block->is_large, 1);
    sub(own.stats.allocated_bytes, block->is_large, block->size);
    sub(own.stats.requested_bytes, block->is_large, block->requested);
    block->users.erase(block->stream);
    if (block->users.empty()) {
      recycle(block);
      return;
    }
    std::vector<EventPtr> events;
    for (StreamId user : block->users) {
      events.push_back(std::make_shared<EventState>());
      record_event(events.back(), state_of(block->device, user));
    }
    own.pending.emplace_back(block, std::move(events));
  }

  // Release blocks whose users are done.
  void settle(int index, bool should_wait) {
    auto& own = devices[index];
    for (auto it = own.pending.begin(); it != own.pending.end();) {
      bool is_done = true;
      for (auto& event : it->second) {
        if (should_wait) event->wait(event->recorded);
        is_done = is_done && event->is_done();
      }
      if (is_done) {
        Block* block = it->first;
        it = own.pending.erase(it);
        recycle(block);
      } else {
        ++it;
      }
    }
  }

  void recycle(Block* block) {
    auto& own = devices[block->device];
    char* data = shadow_of(block->data);
    size_t size = block->size;
    // Overwrite in the order of the allocating stream. A reader on another stream without a wait or
    // record_stream then reads NaN.
    state_of(block->device, block->stream)
        .enqueue({[data, size] { memset(data, kPoison, size); }, "poison", Job::SILENT});
    sub(own.stats.active, block->is_large, 1);
    sub(own.stats.active_bytes, block->is_large, block->size);
    block->is_used = false;
    auto& pool = own.free[{block->stream, block->is_large}];
    if (Block* next = block->next; next && !next->is_used) {
      pool.erase(next);
      block->size += next->size;
      block->next = next->next;
      if (block->next) block->next->previous = block;
      delete next;
    }
    if (Block* previous = block->previous; previous && !previous->is_used) {
      pool.erase(previous);
      previous->size += block->size;
      previous->next = block->next;
      if (previous->next) previous->next->previous = previous;
      delete block;
      block = previous;
    }
    pool.insert(block);
  }

  void emptyCache(c10::MempoolId_t = {0, 0}) override {
    Guard guard(mutex);
    for (int index = 0; index < settings.num_devices; index++) {
      if (!has_context[index]) continue;
      synchronize_device(index);
      settle(index, true);
      synchronize_device(index);
      auto& own = devices[index];
      for (auto& [key, pool] : own.free) {
        for (auto it = pool.begin(); it != pool.end();) {
          Block* block = *it;
          if (block->previous || block->next) {
            ++it;
            continue;
          }
          it = pool.erase(it);
          madvise(shadow_of(block->data), block->size, MADV_REMOVE);
          own.unmapped.emplace(block->size, block->data);
          sub(own.stats.segment, block->is_large, 1);
          sub(own.stats.reserved_bytes, block->is_large, block->size);
          own.stats.num_device_free++;
          delete block;
        }
      }
    }
  }

  bool initialized() override { return arena.front != nullptr; }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* target, const void* source, size_t count) const override {
    StreamState& stream = current_of(current_device);
    void* to = shadow_of(target);
    const void* from = shadow_of(source);
    stream.enqueue({[=] { memcpy(to, from, count); }, "copy_data", Job::COPY});
  }
  void recordStream(const c10::DataPtr& ptr, c10::Stream stream) override {
    if (auto* block = static_cast<Block*>(ptr.get_context())) {
      std::string stack = stack_of_wait();
      Guard guard(mutex);
      block->users.insert(stream.id());
      auto begin = reinterpret_cast<uintptr_t>(block->data);
      note("record_stream", block->device, stream.id(), "", 0, 0, {{begin, begin + block->size}},
           {}, std::move(stack));
    }
  }
  Stats getDeviceStats(DeviceIndex device) override {
    Guard guard(mutex);
    return devices[device].stats;
  }
  template <typename F>
  void each_stat(DeviceIndex device, F f) {
    Guard guard(mutex);
    auto& s = devices[device].stats;
    for (auto* array :
         {&s.allocation, &s.segment, &s.active, &s.inactive_split, &s.allocated_bytes,
          &s.reserved_bytes, &s.active_bytes, &s.inactive_split_bytes, &s.requested_bytes}) {
      for (auto& stat : *array) f(stat);
    }
  }
  void resetAccumulatedStats(DeviceIndex device) override {
    each_stat(device, [](auto& stat) { stat.reset_accumulated(); });
  }
  void resetPeakStats(DeviceIndex device) override {
    each_stat(device, [](auto& stat) { stat.reset_peak(); });
  }
  std::pair<size_t, size_t> memory_info(DeviceIndex device) {
    Guard guard(mutex);
    size_t reserved = devices[device].stats.reserved_bytes[0].current;
    return {settings.capacity - reserved, settings.capacity};
  }
  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex device) {  // torch >= 2.11 overrides it
    return memory_info(device);
  }
};

LateAllocator& allocator = *new LateAllocator;

void release_block(void* context) {
  if (context) allocator.free(static_cast<Block*>(context));
}

// Pinned host memory. A freed block is reused when the copies that used the block are done.
struct PinnedAllocator final : at::HostAllocator {
  struct Pinned {
    size_t size;
    std::vector<EventPtr> events;
  };
  std::mutex mutex;
  std::map<char*, Pinned> used;
  std::deque<std::pair<char*, Pinned>> freed;
  at::HostStats stats;

  static void release(void* address);

  c10::DataPtr allocate(size_t size) override {
    if (size == 0) return {nullptr, nullptr, &release, c10::DeviceType::CPU};
    size_t rounded = 64;
    while (rounded < size) rounded *= 2;  // like torch, rounds up to powers of two
    Lock lock(mutex);
    char* found = nullptr;
    for (auto it = freed.begin(); it != freed.end(); ++it) {
      bool is_done = it->second.size == rounded;
      for (auto& event : it->second.events) is_done = is_done && event->is_done();
      if (is_done) {
        found = it->first;
        freed.erase(it);
        break;
      }
    }
    if (!found) {
      void* fresh =
          mmap(nullptr, rounded, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
      TORCH_CHECK_WITH(OutOfMemoryError, fresh != MAP_FAILED, "late: no pinned memory of ", rounded,
                       " bytes");
      found = static_cast<char*>(fresh);
      stats.allocated_bytes.increase(rounded);
      stats.allocations.increase(1);
      stats.num_host_alloc++;
    }
    memset(found, kPoison, rounded);
    used[found] = {rounded, {}};
    stats.active_bytes.increase(rounded);
    stats.active_requests.increase(1);
    auto begin = reinterpret_cast<uintptr_t>(found);
    note("pinned_alloc", -1, -1, "", 0, 0, {}, {{begin, begin + rounded}});
    return {found, found, &release, c10::DeviceType::CPU};
  }

  void free(char* address) {
    Lock lock(mutex);
    auto it = used.find(address);
    auto begin = reinterpret_cast<uintptr_t>(address);
    note("pinned_free", -1, -1, "", 0, 0, {}, {{begin, begin + it->second.size}});
    stats.active_bytes.decrease(it->second.size);
    stats.active_requests.decrease(1);
    freed.emplace_back(address, std::move(it->second));
    used.erase(it);
  }

  bool is_pinned(const void* address) {
    Lock lock(mutex);
    auto* p = static_cast<char*>(const_cast<void*>(address));
    auto it = used.upper_bound(p);
    if (it == used.begin()) return false;
    --it;
    return p < it->first + it->second.size;
  }

  bool record_use(const void* address, StreamState& stream) {
    Lock lock(mutex);
    auto* p = static_cast<char*>(const_cast<void*>(address));
    auto it = used.upper_bound(p);
    if (it == used.begin() || p >= (--it)->first + it->second.size) return false;
    auto& events = it->second.events;
    events.erase(std::remove_if(events.begin(), events.end(), [](auto& e) { return e->is_done(); }),
                 events.end());
    auto event = std::make_shared<EventState>();
    event->recorded = 1;
    stream.enqueue({[event] { event->fire(1); }, "event", Job::SILENT});
    events.push_back(event);
    return true;
  }

  void copy_data(void* target, const void* source, size_t count) const override {
    default_copy_data(target, source, count);
  }
  bool record_event(void* address, void*, c10::Stream stream) override {
    return record_use(address, state_of(stream));
  }
  void empty_cache() override {
    Lock lock(mutex);
    for (auto& [address, pinned] : freed) {
      for (auto& event : pinned.events) event->wait(1);
      munmap(address, pinned.size);
      stats.allocated_bytes.decrease(pinned.size);
      stats.allocations.decrease(1);
    }
    freed.clear();
  }
  at::HostStats get_stats() override {
    Lock lock(mutex);
    return stats;
  }
  void reset_accumulated_stats() override {
    Lock lock(mutex);
    for (auto* stat :
         {&stats.active_requests, &stats.active_bytes, &stats.allocations, &stats.allocated_bytes})
      stat->reset_accumulated();
  }
  void reset_peak_stats() override {
    Lock lock(mutex);
    for (auto* stat :
         {&stats.active_requests, &stats.active_bytes, &stats.allocations, &stats.allocated_bytes})
      stat->reset_peak();
  }
};

PinnedAllocator& pinned_allocator = *new PinnedAllocator;

void PinnedAllocator::release(void* address) {
  if (address) pinned_allocator.free(static_cast<char*>(address));
}

// --------------------------------------------------------------------------- torch's device guard

struct GuardImpl final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kLate; }
  Device exchangeDevice(Device device) const override {
    Device old = getDevice();
    setDevice(device);
    return old;
  }
  Device getDevice() const override { return {kLate, current_device}; }
  void setDevice(Device device) const override {
    check_device(device.index());
    if (current_device != device.index()) has_context[device.index()] = true;  // like cudaSetDevice
    current_device = device.index();
  }
  void uncheckedSetDevice(Device device) const noexcept override {
    current_device = device.index();
  }
  c10::Stream stream(Device device, StreamId id) const {
    return c10::Stream(c10::Stream::UNSAFE, {kLate, index_of(device)}, id);
  }
  static DeviceIndex index_of(Device device) {
    return device.has_index() ? device.index() : current_device;
  }
  c10::Stream getStream(Device device) const override {
    return stream(device, current_stream[index_of(device)]);
  }
  c10::Stream getDefaultStream(Device device) const override { return stream(device, 0); }
  c10::Stream getStreamFromGlobalPool(Device device, bool is_high = false) const override {
    return getNewStream(device, is_high ? -1 : 0);
  }
  c10::Stream getNewStream(Device device, int priority = 0) const override {
    int index = index_of(device);
    check_device(index);
    has_context[index] = true;
    StreamId id = device_streams[index].next(priority);
    state_of(index, id);
    return stream(device, id);
  }
  c10::Stream exchangeStream(c10::Stream next) const override {
    c10::Stream old = getStream(next.device());
    current_stream[next.device_index()] = next.id();
    return old;
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override {
    delete static_cast<EventPtr*>(event);
  }
  void record(void** event, const c10::Stream& on, const DeviceIndex,
              const c10::EventFlag) const override {
    if (!*event) *event = new EventPtr(std::make_shared<EventState>());
    record_event(*static_cast<EventPtr*>(*event), state_of(on));
  }
  void block(void* event, const c10::Stream& on) const override {
    if (event) wait_event(*static_cast<EventPtr*>(event), state_of(on));
  }
  bool queryEvent(void* event) const override {
    if (!event) return true;
    auto& state = *static_cast<EventPtr*>(event);
    bool is_done = state->is_done();
    // A query that returned true orders the host after the event.
    if (is_done) note_wait("event_query", -1, -1, state->id, state->recorded);
    return is_done;
  }
  void synchronizeEvent(void* event) const override {
    if (!event) return;
    auto& state = *static_cast<EventPtr*>(event);
    uint64_t version;
    int device;
    {
      Lock lock(state->mutex);
      version = state->recorded;
      device = state->device;
    }
    count_sync("event", device);
    state->wait(version);
    note_wait("event_synchronize", -1, -1, state->id, version);
    raise_errors(device);
  }
  double elapsedTime(void* first, void* second, const DeviceIndex) const override {
    TORCH_CHECK(first && second, "late: both events must be recorded before elapsed_time");
    auto &a = *static_cast<EventPtr*>(first), &b = *static_cast<EventPtr*>(second);
    TORCH_CHECK(a->is_done() && b->is_done(), "late: both events must be done before elapsed_time");
    return std::chrono::duration<double, std::milli>(b->time - a->time).count();
  }
  DeviceIndex deviceCount() const noexcept override {
    return static_cast<DeviceIndex>(settings.num_devices.load());
  }
  bool queryStream(const c10::Stream& on) const override {
    bool is_idle = state_of(on).is_idle();
    if (is_idle) note_wait("stream_query", on.device_index(), on.id());
    return is_idle;
  }
  void synchronizeStream(const c10::Stream& on) const override {
    count_sync("stream", on.device_index());
    synchronize_stream(state_of(on));
    raise_errors(on.device_index());
  }
  void synchronizeDevice(const DeviceIndex device) const override {
    count_sync("device", device);
    synchronize_device(device);
    raise_errors(device);
  }
  void recordDataPtrOnStream(const c10::DataPtr& ptr, const c10::Stream& on) const override {
    allocator.recordStream(ptr, on);
  }
};

// ------------------------------------------------------------------------------- random generators

// A seed and the number of operators that drew from it. Each operator draws from a separate CPU
// generator, so the numbers do not depend on when the operator's job runs.
struct LateGenerator final : c10::GeneratorImpl {
  explicit LateGenerator(DeviceIndex device)
      : c10::GeneratorImpl(Device(kLate, device),
                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}
  uint64_t seed_ = c10::default_rng_seed_val, offset_ = 0;

  at::Generator next() {
    std::lock_guard<std::mutex> lock(mutex_);
    return at::detail::createCPUGenerator(mixed(mixed(seed_) ^ offset_++));
  }
  void set_current_seed(uint64_t seed) override {
    seed_ = seed;
    offset_ = 0;
  }
  void set_offset(uint64_t offset) override { offset_ = offset; }
  uint64_t get_offset() const override { return offset_; }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return seed_;
  }
  void set_state(const c10::TensorImpl& state) override {
    TORCH_CHECK(state.numel() == 16 && state.dtype() == caffe2::TypeMeta::Make<uint8_t>(),
                "late: the state of a generator has 16 bytes, got ", state.numel());
    memcpy(&seed_, state.data(), 8);
    memcpy(&offset_, static_cast<const char*>(state.data()) + 8, 8);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    auto state = at::detail::empty_cpu({16}, at::kByte);
    memcpy(state.mutable_data_ptr(), &seed_, 8);
    memcpy(static_cast<char*>(state.mutable_data_ptr()) + 8, &offset_, 8);
    return state.getIntrusivePtr();
  }
  static c10::DeviceType device_type() { return kLate; }

 private:
  LateGenerator* clone_impl() const override {
    auto* copy = new LateGenerator(device().index());
    copy->seed_ = seed_;
    copy->offset_ = offset_;
    return copy;
  }
};

const at::Generator& default_generator(DeviceIndex index) {
  static auto& generators = *[] {
    auto* made = new std::vector<at::Generator>;
    for (int i = 0; i < kMaxDevices; i++)
      made->push_back(at::make_generator<LateGenerator>(static_cast<DeviceIndex>(i)));
    return made;
  }();
  return generators.at(index < 0 ? current_device : index);
}

// --------------------------------------------------------------------------------- torch's hooks

void resize_bytes(c10::StorageImpl& storage, size_t size) {
  c10::OptionalDeviceGuard guard(storage.device());
  c10::DataPtr fresh = allocator.allocate(size);
  size_t kept = std::min(size, storage.nbytes());
  if (kept > 0) allocator.copy_data(fresh.get(), storage.data(), kept);
  storage.set_data_ptr_noswap(std::move(fresh));
  storage.set_nbytes(size);
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return settings.num_devices > 0; }
  const at::Generator& getDefaultGenerator(DeviceIndex index) const override {
    return default_generator(index);
  }
  at::Generator getNewGenerator(DeviceIndex index = -1) const override {
    return at::make_generator<LateGenerator>(index < 0 ? current_device : index);
  }
  Device getDeviceFromPtr(void* data) const override {
    TORCH_CHECK(is_front(data), "late: the address is not the device's");
    return {kLate, static_cast<DeviceIndex>((static_cast<char*>(data) - arena.front) / kSpan)};
  }
  bool isPinnedPtr(const void* data) const override { return pinned_allocator.is_pinned(data); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  bool hasPrimaryContext(DeviceIndex device) const override { return has_context[device]; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    resize_bytes(*storage.unsafeGetStorageImpl(), size);
  }
  DeviceIndex deviceCount() const override {
    return static_cast<DeviceIndex>(settings.num_devices.load());
  }
  void setCurrentDevice(DeviceIndex device) const override {
    GuardImpl().setDevice({kLate, device});
  }
  DeviceIndex getCurrentDevice() const override { return current_device; }
  DeviceIndex exchangeDevice(DeviceIndex device) const override {
    DeviceIndex old = current_device;
    setCurrentDevice(device);
    return old;
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override {
    DeviceIndex old = current_device;
    if (device >= 0) GuardImpl().uncheckedSetDevice({kLate, device});
    return old;
  }
};

// --------------------------------------------------------------------------------------- operators

bool is_late(const Tensor& tensor) { return tensor.defined() && tensor.device().type() == kLate; }

Range range_of(const Tensor& tensor) {
  if (tensor.numel() == 0 || !tensor.has_storage()) return {0, 0};
  int64_t last = 0;
  for (int64_t d = 0; d < tensor.dim(); d++) last += (tensor.size(d) - 1) * tensor.stride(d);
  auto base = reinterpret_cast<uintptr_t>(tensor.storage().data()) +
              static_cast<uintptr_t>(tensor.storage_offset()) * tensor.element_size();
  return {base, base + static_cast<uintptr_t>(last + 1) * tensor.element_size()};
}

// Memory that one operator accesses, and CPU tensors over the shadow memory of its arguments.
struct Launch {
  std::vector<std::pair<c10::StorageImpl*, c10::Storage>> storages;
  std::vector<Range> reads, writes;
  int64_t bytes_read = 0, bytes_written = 0;

  void touch(const Tensor& tensor, bool is_write) {
    Range range = range_of(tensor);
    if (range.begin == range.end) return;
    (is_write ? writes : reads).push_back(range);
    (is_write ? bytes_written : bytes_read) +=
        tensor.numel() * static_cast<int64_t>(tensor.element_size());
  }

  Tensor twin(const Tensor& tensor) {
    auto* base = tensor.storage().unsafeGetStorageImpl();
    c10::Storage* storage = nullptr;
    for (auto& [known, made] : storages) {
      if (known == base) storage = &made;
    }
    if (!storage) {
      c10::DataPtr data(shadow_of(base->mutable_data()), Device(c10::DeviceType::CPU));
      storages.emplace_back(base, c10::Storage(c10::Storage::use_byte_size_t(), base->nbytes(),
                                               std::move(data), nullptr, false));
      storage = &storages.back().second;
    }
    auto twin = at::detail::make_tensor<c10::TensorImpl>(
        c10::Storage(*storage), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
    auto* impl = twin.unsafeGetTensorImpl();
    impl->set_storage_offset(tensor.storage_offset());
    impl->set_sizes_and_strides(tensor.sizes(), tensor.strides());
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
    if (tensor.is_conj()) impl->_set_conj(true);
    if (tensor.is_neg()) impl->_set_neg(true);
    return twin;
  }
};

void submit(StreamState& stream, const std::string& name, Launch& launch, Job::Kind kind,
            std::function<void()> run) {
  {
    Lock lock(counters_mutex);
    auto& own = counters[stream.device];
    own.launches++;
    own.by_op[name]++;
    own.bytes_read += launch.bytes_read;
    own.bytes_written += launch.bytes_written;
  }
  note("launch", stream.device, stream.id, name, 0, 0, std::move(launch.reads),
       std::move(launch.writes));
  int num_threads = at::get_num_threads();
  stream.enqueue({[run = std::move(run), num_threads] {
                    if (at::get_num_threads() != num_threads) at::set_num_threads(num_threads);
                    run();
                  },
                  name, kind});
}

Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<Device> device, std::optional<bool>,
             std::optional<at::MemoryFormat> format) {
  if (device) check_device(GuardImpl::index_of(*device));
  c10::OptionalDeviceGuard guard(device && device->has_index() ? device : std::nullopt);
  return at::detail::empty_generic(size, &allocator,
                                   c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride,
                     std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                     std::optional<Device> device, std::optional<bool>) {
  if (device) check_device(GuardImpl::index_of(*device));
  c10::OptionalDeviceGuard guard(device && device->has_index() ? device : std::nullopt);
  return at::detail::empty_strided_generic(size, stride, &allocator,
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}

Tensor empty_as(const Tensor& like, Device device) {
  return empty_strided(like.sizes(), like.strides(), like.scalar_type(), {}, device, {});
}

// Operators whose result's shape or value the host needs, so the host waits for the stream.
const std::unordered_set<std::string>& data_dependent() {
  static const auto& names = *new std::unordered_set<std::string>{"aten::nonzero",
                                                                  "aten::masked_select",
                                                                  "aten::_unique2",
                                                                  "aten::_unique",
                                                                  "aten::unique_dim",
                                                                  "aten::unique_consecutive",
                                                                  "aten::bincount",
                                                                  "aten::equal",
                                                                  "aten::repeat_interleave",
                                                                  "aten::nonzero_static",
                                                                  "aten::unique_dim_consecutive",
                                                                  "aten::histogram"};
  return names;
}

bool takes_host_indices(const std::string& name) { return name.find("index") != std::string::npos; }

// Applies ``f`` to the tensors of a stack value, which holds a tensor or a list of tensors.
template <typename F>
IValue mapped(const IValue& value, F f) {
  if (value.isTensor()) return f(value.toTensor());
  if (value.isTensorList()) {
    c10::List<Tensor> found;
    for (const Tensor& tensor : value.toTensorList()) found.push_back(f(tensor));
    return found;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> found;
    for (std::optional<Tensor> tensor : value.toOptionalTensorList())
      found.push_back(tensor ? std::optional<Tensor>(f(*tensor)) : std::nullopt);
    return found;
  }
  return value;
}

// A host tensor of zeros with the shape, strides and dtype of a tensor of the device.
Tensor model_of(const Tensor& tensor) {
  if (!is_late(tensor)) return tensor;
  auto model =
      at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kCPU));
  if (model.numel() > 0) memset(model.storage().mutable_data(), 0, model.storage().nbytes());
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number())
    model.unsafeGetTensorImpl()->set_wrapped_number(true);
  return model;
}

// Resizes an empty ``out=`` tensor to the shape of the operator's result.
void resize_out(const Tensor& out, c10::IntArrayRef size) {
  auto* impl = out.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(size);
  size_t needed = (impl->storage_offset() + impl->numel()) * impl->itemsize();
  auto* storage = out.storage().unsafeGetStorageImpl();
  if (needed > storage->nbytes()) resize_bytes(*storage, needed);
}

struct Call {
  const c10::OperatorHandle& op;
  torch::jit::Stack* stack;
  const c10::FunctionSchema& schema;
  size_t num_args, first;
  std::string name;
  Device device;
  bool is_functional = true;  // returns tensors that are not arguments

  Call(const c10::OperatorHandle& op, torch::jit::Stack* stack)
      : op(op),
        stack(stack),
        schema(op.schema()),
        num_args(schema.arguments().size()),
        first(stack->size() - num_args),
        name(op.operator_name().name),
        device(kLate, current_device) {
    bool has_found = false;
    for (size_t i = first; i < stack->size(); i++) {
      (void)mapped((*stack)[i], [&](const Tensor& tensor) {
        if (is_late(tensor) && !has_found) {
          has_found = true;
          device = tensor.device();
        }
        return tensor;
      });
      if (!has_found && (*stack)[i].isDevice() && (*stack)[i].toDevice().has_index())
        device = (*stack)[i].toDevice();
    }
    check_device(device.index());
    is_functional = false;
    for (auto& result : schema.returns()) {
      const auto* alias = result.alias_info();
      TORCH_CHECK_NOT_IMPLEMENTED(!alias || alias->isWrite(), "late: ", op.operator_name(),
                                  " returns a view and has no kernel here");
      if (!alias) is_functional = true;
    }
  }

  bool is_written(size_t i) const {
    const auto* alias = schema.arguments()[i].alias_info();
    return alias && alias->isWrite();
  }

  torch::jit::Stack model_stack() const {
    torch::jit::Stack found;
    for (size_t i = 0; i < num_args; i++) {
      const IValue& value = (*stack)[first + i];
      if (value.isDevice()) {
        found.emplace_back(Device(at::kCPU));
      } else if (value.isGenerator()) {
        found.emplace_back();
      } else {
        found.push_back(mapped(value, model_of));
      }
    }
    return found;
  }

  // Cache key: everything that the shapes, strides and dtypes of the results depend on.
  std::string signature() const {
    std::ostringstream text;
    text << op.operator_name();
    for (size_t i = 0; i < num_args; i++) {
      text << "|";
      bool has_tensors = false;
      (void)mapped((*stack)[first + i], [&](const Tensor& tensor) {
        has_tensors = true;
        if (tensor.defined()) {
          text << tensor.scalar_type() << tensor.sizes() << tensor.strides() << is_late(tensor)
               << tensor.unsafeGetTensorImpl()->is_wrapped_number();
        } else {
          text << "-";
        }
        return tensor;
      });
      if (!has_tensors && !(*stack)[first + i].isGenerator()) text << (*stack)[first + i];
    }
    return text.str();
  }

  // Returns the arguments as tensors over shadow memory. Host tensors are copied now.
  torch::jit::Stack twin_stack(Launch& launch) {
    torch::jit::Stack found;
    for (size_t i = 0; i < num_args; i++) {
      const IValue& value = (*stack)[first + i];
      const auto& argument = schema.arguments()[i];
      if (value.isDevice()) {
        found.emplace_back(Device(at::kCPU));
        continue;
      }
      if (argument.name() == "generator") {
        found.emplace_back(next_generator(value));
        continue;
      }
      bool is_write = is_written(i);
      found.push_back(mapped(value, [&](const Tensor& tensor) {
        if (!tensor.defined()) return tensor;
        if (is_late(tensor)) {
          TORCH_CHECK(tensor.device() == device, "late: ", op.operator_name(), " got tensors on ",
                      device, " and ", tensor.device());
          launch.touch(tensor, is_write);
          return launch.twin(tensor);
        }
        TORCH_CHECK(!is_write && tensor.device().is_cpu() &&
                        (tensor.dim() == 0 || takes_host_indices(name)),
                    "late: expected all tensors of ", op.operator_name(), " on ", device,
                    ", got one of ", tensor.numel(), " elements on ", tensor.device(),
                    " (argument ", argument.name(), ")");
        return tensor.clone();
      }));
    }
    return found;
  }

  IValue next_generator(const IValue& value) const {
    at::Generator generator = default_generator(device.index());
    if (value.isGenerator()) generator = value.toGenerator();
    TORCH_CHECK(generator.device().type() == kLate, "late: expected a generator of ", device,
                ", got one of ", generator.device());
    return at::check_generator<LateGenerator>(generator)->next();
  }

  void return_arguments() {
    std::vector<IValue> results;
    for (auto& result : schema.returns()) {
      for (size_t i = 0; i < num_args; i++) {
        const auto* alias = schema.arguments()[i].alias_info();
        if (alias && *alias == *result.alias_info()) {
          results.push_back((*stack)[first + i]);
          break;
        }
      }
    }
    finish(std::move(results));
  }

  void finish(std::vector<IValue> results) {
    stack->resize(first);
    for (auto& result : results) stack->push_back(std::move(result));
  }
};

// Replaces the arguments on the stack by the results. torch 2.10 drops the arguments first, but
// in-place results may refer to them, so ``kept`` keeps the arguments alive.
void run_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack& stack) {
  const torch::jit::Stack kept = stack;
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
}

// The host waits, runs the CPU's kernel itself, and copies results up.
void run_now(Call& call, const char* why) {
  StreamState& stream = current_of(call.device.index());
  count_sync(why, call.device.index());
  synchronize_stream(stream, why);
  raise_errors(call.device.index());
  Launch launch;
  auto args = call.twin_stack(launch);
  std::vector<IValue> results;
  {
    at::AutoDispatchBelowADInplaceOrView below;
    run_on_cpu(call.op, args);
    for (auto& value : args) {
      results.push_back(mapped(value, [&](const Tensor& tensor) {
        if (!tensor.defined()) return tensor;
        Tensor out = empty_as(tensor, call.device);
        Launch copy;
        copy.touch(out, true);
        Tensor target = copy.twin(out);
        submit(stream, call.name, copy, Job::KERNEL, [target, tensor] { target.copy_(tensor); });
        return out;
      }));
    }
  }
  if (call.is_functional) {
    call.finish(std::move(results));
  } else {
    call.return_arguments();
  }
}

struct Form {  // of a result
  bool is_defined;
  std::vector<int64_t> sizes, strides;
  at::ScalarType dtype;
};
using Forms = std::vector<Form>;
std::mutex& forms_mutex = *new std::mutex;
std::unordered_map<std::string, std::pair<Forms, torch::jit::Stack>>& known_forms =
    *new std::unordered_map<std::string, std::pair<Forms, torch::jit::Stack>>;

// Returns the forms of an operator's tensor results, and the results with forms replacing tensors.
// The first call runs the CPU's kernel on zeros. Meta kernels differ in details that later kernels
// depend on, such as the dtype of a layer norm's statistics in bf16.
std::pair<Forms, torch::jit::Stack> forms_of(Call& call) {
  std::string key = call.signature();
  {
    Lock lock(forms_mutex);
    auto known = known_forms.find(key);
    if (known != known_forms.end()) return known->second;
  }
  auto args = call.model_stack();
  auto given = args;
  run_on_cpu(call.op, args);
  Forms forms;
  auto note_form = [&](const Tensor& tensor) {
    if (!tensor.defined()) {
      forms.push_back({false, {}, {}, at::kFloat});
    } else {
      forms.push_back({true, tensor.sizes().vec(), tensor.strides().vec(), tensor.scalar_type()});
    }
    return Tensor();
  };
  torch::jit::Stack results;
  for (auto& value : call.is_functional ? args : given) results.push_back(mapped(value, note_form));
  Lock lock(forms_mutex);
  if (known_forms.size() > 20000) known_forms.clear();
  return known_forms[key] = {std::move(forms), std::move(results)};
}

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  Call call(op, stack);
  c10::DeviceGuard guard(call.device);
  if (data_dependent().count(call.name)) return run_now(call, "item");
  std::vector<IValue> results;
  std::vector<Tensor> outs;  // outputs of a functional operator, flattened
  {
    at::AutoDispatchBelowADInplaceOrView below;
    bool needs_shape = call.is_functional;
    for (size_t i = 0; i < call.num_args && !call.is_functional; i++) {
      const IValue& value = (*stack)[call.first + i];
      if (call.schema.arguments()[i].is_out() && value.isTensor() && value.toTensor().numel() == 0)
        needs_shape = true;
    }
    if (needs_shape) {
      auto [forms, shells] = forms_of(call);
      size_t next = 0;
      if (call.is_functional) {
        for (auto& shell : shells) {
          results.push_back(mapped(shell, [&](const Tensor&) {
            const Form& form = forms.at(next++);
            outs.push_back(form.is_defined ? empty_strided(form.sizes, form.strides, form.dtype, {},
                                                           call.device, {})
                                           : Tensor());
            return outs.back();
          }));
        }
      } else {
        for (size_t i = 0; i < call.num_args; i++) {
          (void)mapped((*stack)[call.first + i], [&](const Tensor& tensor) {
            const Form& form = forms.at(next++);
            if (call.is_written(i) && tensor.numel() == 0) resize_out(tensor, form.sizes);
            return tensor;
          });
        }
      }
    }
    Launch launch;
    auto args = call.twin_stack(launch);
    std::vector<Tensor> targets;
    for (auto& out : outs) {
      if (out.defined()) launch.touch(out, true);
      targets.push_back(out.defined() ? launch.twin(out) : Tensor());
    }
    submit(current_of(call.device.index()), call.name, launch, Job::KERNEL,
           [op, args = std::move(args), targets = std::move(targets)]() mutable {
             run_on_cpu(op, args);
             size_t next = 0;
             for (auto& value : args) {
               (void)mapped(value, [&](const Tensor& tensor) {
                 if (next < targets.size() && targets[next].defined()) targets[next].copy_(tensor);
                 next++;
                 return tensor;
               });
             }
           });
  }
  if (call.is_functional) {
    call.finish(std::move(results));
  } else {
    call.return_arguments();
  }
}

// -------------------------------------------------------------------------------- copies and views

bool is_plain_copy(const Tensor& source, const Tensor& target) {
  return source.scalar_type() == target.scalar_type() && source.sizes() == target.sizes() &&
         source.is_contiguous() && target.is_contiguous() && source.is_conj() == target.is_conj() &&
         source.is_neg() == target.is_neg();
}

Tensor copy_from(const Tensor& source, const Tensor& target, bool non_blocking) {
  at::AutoDispatchBelowADInplaceOrView below;
  if (target.numel() == 0) return target;
  Launch launch;
  launch.touch(source, false);
  launch.touch(target, true);
  if (is_late(source) && is_late(target)) {
    Tensor from = launch.twin(source), to = launch.twin(target);
    StreamState& stream = current_of(source.device().index());
    bool is_peer = source.device() != target.device();
    StreamState& other = current_of(target.device().index());
    if (is_peer) {  // orders the copy on both devices' streams
      auto ready = std::make_shared<EventState>();
      record_event(ready, other);
      wait_event(ready, stream);
    }
    submit(stream, "aten::copy_", launch, Job::COPY, [from, to] { to.copy_(from); });
    if (is_peer) {
      auto done = std::make_shared<EventState>();
      record_event(done, stream);
      wait_event(done, other);
    }
    return target;
  }
  bool is_upload = is_late(target);
  const Tensor& host = is_upload ? source : target;
  TORCH_CHECK(host.device().is_cpu(), "late: no copy between ", source.device(), " and ",
              target.device());
  int device = (is_upload ? target : source).device().index();
  StreamState& stream = current_of(device);
  bool is_async =
      non_blocking && is_plain_copy(source, target) && pinned_allocator.is_pinned(host.data_ptr());
  // A job holds no reference to a tensor. Freed pinned memory is not reused before the copy ends.
  auto plain = [](const Tensor& tensor) {
    auto view = at::detail::make_tensor<c10::TensorImpl>(
        c10::Storage(c10::Storage::use_byte_size_t(), tensor.storage().nbytes(),
                     c10::DataPtr(tensor.storage().mutable_data(), Device(c10::DeviceType::CPU)),
                     nullptr, false),
        c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
    view.unsafeGetTensorImpl()->set_storage_offset(tensor.storage_offset());
    view.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides());
    if (tensor.is_conj()) view.unsafeGetTensorImpl()->_set_conj(true);
    if (tensor.is_neg()) view.unsafeGetTensorImpl()->_set_neg(true);
    return view;
  };
  Tensor from = is_upload ? plain(source) : launch.twin(source);
  Tensor to = is_upload ? launch.twin(target) : plain(target);
  submit(stream, is_upload ? "copy up" : "copy down", launch, Job::COPY,
         [from, to] { to.copy_(from); });
  if (is_async) {
    pinned_allocator.record_use(host.data_ptr(), stream);
  } else {
    count_sync("copy", device);
    synchronize_stream(stream, "copy");
    raise_errors(device);
  }
  return target;
}

const Tensor& resize(const Tensor& self, c10::IntArrayRef size,
                     std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(
      !format || *format == at::MemoryFormat::Contiguous || *format == at::MemoryFormat::Preserve,
      "late: resize_ with a memory format is not supported");
  if (self.sizes() != size) resize_out(self, size);
  return self;
}

Tensor copy_from_and_resize(const Tensor& source, const Tensor& target) {
  if (target.sizes() != source.sizes()) resize_out(target, source.sizes());
  return copy_from(source, target, false);
}

at::Scalar local_scalar(const Tensor& self) {
  int device = self.device().index();
  count_sync("item", device);
  StreamState& stream = current_of(device);
  note("launch", device, stream.id, "item", 0, 0, {range_of(self)});
  synchronize_stream(stream, "item");
  raise_errors(device);
  at::AutoDispatchBelowADInplaceOrView below;
  Launch launch;
  return launch.twin(self).item();
}

Tensor view(const Tensor& self, c10::IntArrayRef size) { return at::native::view(self, size); }
Tensor as_strided(const Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride,
                  std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, size, stride, offset);
}
Tensor reshape_alias(const Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride) {
  return at::native::_reshape_alias(self, size, stride);
}

Tensor& set_storage(Tensor& self, at::Storage storage, int64_t offset, c10::IntArrayRef size,
                    c10::IntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  impl->set_storage_offset(offset);
  if (stride.size() == size.size() && !(stride.empty() && !size.empty())) {
    impl->set_sizes_and_strides(size, stride);
  } else {
    impl->set_sizes_contiguous(size);
  }
  return self;
}
Tensor& set_source_storage(Tensor& self, at::Storage storage) {
  int64_t numel = static_cast<int64_t>(storage.nbytes() / self.element_size());
  return set_storage(self, std::move(storage), 0, {numel}, {1});
}
Tensor& set_source_tensor(Tensor& self, const Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(),
                     source.strides());
}
Tensor& set_nothing(Tensor& self) {
  return set_source_storage(
      self, c10::Storage(c10::Storage::use_byte_size_t(), 0, c10::DataPtr(nullptr, self.device()),
                         &allocator, true));
}

void record_stream(Tensor& self, c10::Stream stream) {
  TORCH_CHECK(stream.device_type() == kLate, "late: record_stream with a stream of ",
              stream.device());
  allocator.recordStream(self.storage().data_ptr(), stream);
}

// torch treats CUDA and CPU tensors as compatible, so that ``param.data = moved`` works.
bool is_compatible(const Tensor& self, const Tensor& from) {
  auto is_plain = [](const Tensor& tensor) {
    return tensor.layout() == at::kStrided && (is_late(tensor) || tensor.device().is_cpu());
  };
  return is_plain(self) && is_plain(from);
}

int64_t sdp_choice(const Tensor& query, const Tensor& key, const Tensor& value,
                   const std::optional<Tensor>& mask, double dropout, bool is_causal,
                   std::optional<double> scale, bool enable_gqa) {
  // Makes the CPU's choice, to get the CPU's bits. The choice depends only on shapes and flags.
  auto like = [](const Tensor& tensor) {
    Launch launch;
    Tensor twin = launch.twin(tensor);
    return at::GradMode::is_enabled() && tensor.requires_grad() ? twin.set_requires_grad(true)
                                                                : twin;
  };
  return at::cpu::_fused_sdp_choice(
      like(query), like(key), like(value),
      mask && is_late(*mask) ? std::optional<Tensor>(like(*mask)) : mask, dropout, is_causal, scale,
      enable_gqa);
}

// ------------------------------------------------------------------------------------- collectives

// One rank's arguments of a collective. Addresses are in shadow memory.
struct Contribution {
  std::string kind;
  char *out, *input;
  size_t out_bytes, input_bytes;
  at::ScalarType dtype;
  int64_t source;
  bool is_there = false;

  std::string described() const {
    return kind + " of " + std::to_string(input_bytes) + " bytes of " + c10::toString(dtype) +
           " into " + std::to_string(out_bytes) +
           (kind == "broadcast" ? " from rank " + std::to_string(source) : "");
  }
};

struct Meeting {
  std::vector<Contribution> ranks;
  int num_there = 0, num_done = 0, num_gone = 0;
};

// Ranks that exchange data in launch order. Each rank's job waits for its peers' jobs, reads their
// memory, and ends when all ranks have read.
struct Communicator {
  int64_t world = 0;
  std::string name;
  int size = 0;
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<uint64_t> launched;
  std::map<uint64_t, Meeting> meetings;
  std::string failure;

  void fail(const std::string& message) {  // the caller holds the lock
    if (failure.empty()) failure = message;
    changed.notify_all();
  }

  template <typename F>
  void wait(Lock& lock, int rank, uint64_t number, double timeout_s, F is_ready) {
    bool is_in_time = changed.wait_for(lock, std::chrono::duration<double>(timeout_s),
                                       [&] { return is_ready() || !failure.empty(); });
    if (!is_in_time) {
      auto& meeting = meetings[number];
      std::ostringstream text;
      text << "rank " << rank << " of " << name << " waited " << timeout_s
           << " s in its collective no. " << number << " (" << meeting.ranks[rank].described()
           << ") for ranks";
      for (int peer = 0; peer < size; peer++) {
        if (!meeting.ranks[peer].is_there) text << " " << peer;
      }
      fail(text.str());
    }
    TORCH_CHECK(failure.empty(), failure);
  }

  void match(const Meeting& meeting, uint64_t number) {
    for (int peer = 1; peer < size; peer++) {
      auto first = meeting.ranks[0].described(), other = meeting.ranks[peer].described();
      if (first == other) continue;
      fail("ranks differ in collective no. " + std::to_string(number) + " of " + name +
           ": rank 0 starts " + first + ", rank " + std::to_string(peer) + " " + other);
    }
  }

  void run(int rank, uint64_t number, Contribution mine, double timeout_s) {
    Lock lock(mutex);
    TORCH_CHECK(failure.empty(), failure);
    auto& meeting = meetings[number];
    if (meeting.ranks.empty()) meeting.ranks.resize(size);
    mine.is_there = true;
    meeting.ranks[rank] = mine;
    if (++meeting.num_there == size) match(meeting, number);
    changed.notify_all();
    wait(lock, rank, number, timeout_s, [&] { return meeting.num_there == size; });
    lock.unlock();
    Tensor sum = read(rank, meeting, mine);
    lock.lock();
    meeting.num_done++;
    changed.notify_all();
    wait(lock, rank, number, timeout_s, [&] { return meeting.num_done == size; });
    if (sum.defined()) memcpy(mine.out, sum.data_ptr(), mine.out_bytes);
    if (++meeting.num_gone == size) meetings.erase(number);
  }

  // Returns a sum instead of storing it, because the sum overwrites memory that peers still read.
  Tensor read(int rank, const Meeting& meeting, const Contribution& mine) const {
    auto& ranks = meeting.ranks;
    size_t bytes = mine.input_bytes;
    if (mine.kind == "all_gather") {
      for (int peer = 0; peer < size; peer++)
        memmove(mine.out + peer * bytes, ranks[peer].input, bytes);
    } else if (mine.kind == "all_to_all") {
      size_t part = bytes / size;
      for (int peer = 0; peer < size; peer++)
        memcpy(mine.out + peer * part, ranks[peer].input + rank * part, part);
    } else if (mine.kind == "broadcast") {
      if (rank != mine.source) memcpy(mine.out, ranks[mine.source].input, bytes);
    } else {
      auto numel = static_cast<int64_t>(bytes / c10::elementSize(mine.dtype));
      Tensor sum;
      for (auto& peer : ranks) {
        auto row = at::empty({numel}, at::TensorOptions(mine.dtype));
        memcpy(row.data_ptr(), peer.input, bytes);
        sum = sum.defined() ? sum.add_(row) : row;
      }
      return sum;
    }
    return Tensor();
  }
};

std::mutex& communicators_mutex = *new std::mutex;
std::deque<Communicator>& communicators = *new std::deque<Communicator>;
using WorldAndName = std::pair<int64_t, std::string>;
std::map<WorldAndName, int64_t>& communicators_by_name = *new std::map<WorldAndName, int64_t>;
std::map<int64_t, std::string>& failed_worlds = *new std::map<int64_t, std::string>;

int64_t communicator(int64_t world, const std::string& name, int64_t size) {
  Lock lock(communicators_mutex);
  auto next = static_cast<int64_t>(communicators.size());
  auto [it, is_new] = communicators_by_name.emplace(WorldAndName(world, name), next);
  if (is_new) {
    auto& made = communicators.emplace_back();
    made.world = world;
    made.name = name;
    made.size = static_cast<int>(size);
    made.launched.resize(size);
    auto failed = failed_worlds.find(world);
    if (failed != failed_worlds.end()) made.failure = failed->second;
  }
  return it->second;
}

void fail_world(int64_t world, const std::string& message) {
  Lock lock(communicators_mutex);
  failed_worlds.emplace(world, message);
  for (auto& each : communicators) {
    if (each.world != world) continue;
    Lock inner(each.mutex);
    each.fail(message);
  }
}

void collective(int64_t index, const std::string& kind, int64_t rank, const Tensor& out,
                const Tensor& input, int64_t source, int64_t stream_id, double timeout_s) {
  Communicator* on;
  {
    Lock lock(communicators_mutex);
    on = &communicators.at(index);
  }
  TORCH_CHECK(is_late(out) && is_late(input) && out.device() == input.device(), "late: ", kind,
              " of ", on->name, " needs tensors on one device, got ", out.device(), " and ",
              input.device());
  TORCH_CHECK(out.is_contiguous() && input.is_contiguous(), "late: ", kind, " of ", on->name,
              " needs contiguous tensors");
  int64_t expected = input.numel() * (kind == "all_gather" ? on->size : 1);
  TORCH_CHECK(out.dtype() == input.dtype() && out.numel() == expected &&
                  (kind != "all_to_all" || input.numel() % on->size == 0),
              "late: ", kind, " of ", on->name, " among ", on->size, " ranks: ", input.numel(),
              " elements of ", input.dtype(), " do not fit ", out.numel(), " of ", out.dtype());
  if (input.numel() == 0) return;
  Launch launch;
  launch.touch(input, false);
  launch.touch(out, true);
  auto address = [](const Tensor& tensor) {
    return static_cast<char*>(shadow_of(tensor.storage().mutable_data())) +
           tensor.storage_offset() * tensor.element_size();
  };
  Contribution mine{kind,           address(out),      address(input), out.nbytes(),
                    input.nbytes(), out.scalar_type(), source};
  uint64_t number;
  {
    Lock lock(on->mutex);
    number = on->launched[rank]++;
  }
  auto place = static_cast<int>(rank);
  submit(state_of(out.device().index(), stream_id), kind, launch, Job::COPY,
         [=] { on->run(place, number, mine, timeout_s); });
}

void drain() {  // raises no errors of jobs
  for (int i = 0; i < settings.num_devices; i++) synchronize_device(i);
}

void forget_errors() {
  Lock lock(errors_mutex);
  for (auto& error : errors) error.clear();
}

// --------------------------------------------------------------------------- queries from Python

std::string json_string(const std::string& text) {
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

void start(int64_t num_devices) {
  TORCH_CHECK(num_devices >= 1 && num_devices <= kMaxDevices, "late: 1 to ", kMaxDevices,
              " devices, got ", num_devices);
  settings.num_devices = static_cast<int>(num_devices);
  map_memory();
}

void set_delays(int64_t seed, int64_t kernel_us, int64_t copy_us) {
  settings.seed = static_cast<uint64_t>(seed);
  settings.kernel_us = kernel_us;
  settings.copy_us = copy_us;
}

void hold(bool is_copy, bool is_held) { holds.set(is_copy, is_held); }

std::string read_counters(int64_t device) {
  check_device(device);
  Lock lock(counters_mutex);
  auto& own = counters[device];
  auto object = [](const std::map<std::string, int64_t>& values) {
    std::ostringstream text;
    const char* comma = "";
    text << "{";
    for (auto& [name, count] : values) {
      text << comma << json_string(name) << ":" << count;
      comma = ",";
    }
    text << "}";
    return text.str();
  };
  std::ostringstream text;
  text << "{\"launches\":" << own.launches << ",\"bytes_read\":" << own.bytes_read
       << ",\"bytes_written\":" << own.bytes_written << ",\"by_op\":" << object(own.by_op)
       << ",\"syncs\":" << object(own.syncs) << ",\"stacks\":[";
  const char* comma = "";
  for (auto& [kind, stack] : own.stacks) {
    text << comma << "[" << json_string(kind) << "," << json_string(stack) << "]";
    comma = ",";
  }
  text << "]}";
  return text.str();
}

void reset_counters(bool has_stacks) {
  Lock lock(counters_mutex);
  for (auto& own : counters) own = {};
  settings.has_stacks = has_stacks;
}

void set_tracing(bool is_on) {
  Lock lock(trace_mutex);
  if (is_on) trace.clear();
  settings.is_tracing = is_on;
}

std::string read_trace() {
  Lock lock(trace_mutex);
  std::ostringstream text;
  auto ranges = [&](const std::vector<Range>& all) {
    const char* comma = "";
    text << "[";
    for (auto& range : all) {
      if (range.begin == range.end) continue;
      text << comma << "[" << range.begin << "," << range.end << "]";
      comma = ",";
    }
    text << "]";
  };
  const char* comma = "";
  text << "[";
  for (auto& record : trace) {
    text << comma << "[" << json_string(record.kind) << "," << record.device << "," << record.stream
         << "," << json_string(record.name) << "," << record.id << "," << record.version << ",";
    ranges(record.reads);
    text << ",";
    ranges(record.writes);
    text << "," << record.thread << "," << json_string(record.stack) << "]";
    comma = ",";
  }
  text << "]";
  return text.str();
}

// Traces accesses to host memory and synchronisation between threads, which torch cannot see.
void note_host(std::string kind, std::string name, int64_t id, at::IntArrayRef reads,
               at::IntArrayRef writes) {
  auto ranges = [](at::IntArrayRef bounds) {
    std::vector<Range> found;
    for (size_t i = 0; i + 1 < bounds.size(); i += 2) {
      found.push_back({static_cast<uintptr_t>(bounds[i]), static_cast<uintptr_t>(bounds[i + 1])});
    }
    return found;
  };
  note(kind, -1, -1, std::move(name), static_cast<uint64_t>(id), 0, ranges(reads), ranges(writes));
}

std::vector<int64_t> contexts() {
  std::vector<int64_t> found;
  for (int i = 0; i < settings.num_devices; i++) {
    if (has_context[i]) found.push_back(i);
  }
  return found;
}

void forget_contexts() {
  for (auto& context : has_context) context = false;
}

std::vector<int64_t> memory_info(int64_t device) {
  auto [free, total] = allocator.memory_info(static_cast<DeviceIndex>(device));
  return {static_cast<int64_t>(free), static_cast<int64_t>(total)};
}

void set_capacity(int64_t bytes) { settings.capacity = static_cast<size_t>(bytes); }

Tensor get_rng_state(int64_t device) {
  check_device(device);
  return Tensor(
      default_generator(static_cast<DeviceIndex>(device)).unsafeGetGeneratorImpl()->get_state());
}

void set_rng_state(int64_t device, const Tensor& state) {
  check_device(device);
  default_generator(static_cast<DeviceIndex>(device))
      .unsafeGetGeneratorImpl()
      ->set_state(*state.unsafeGetTensorImpl());
}

void manual_seed(int64_t device, int64_t seed) {
  check_device(device);
  default_generator(static_cast<DeviceIndex>(device))
      .unsafeGetGeneratorImpl()
      ->set_current_seed(static_cast<uint64_t>(seed));
}

}  // namespace late

// ------------------------------------------------------------------------------------ registration

namespace c10::impl {
using late::GuardImpl;
C10_REGISTER_GUARD_IMPL(PrivateUse1, GuardImpl)
}  // namespace c10::impl

namespace late {
namespace {
struct Registrar {
  Registrar() {
    c10::SetAllocator(kLate, &allocator);
    at::RegisterPrivateUse1HooksInterface(new Hooks);
  }
} registrar;
}  // namespace
REGISTER_HOST_ALLOCATOR(at::kPrivateUse1, &late::pinned_allocator)

TORCH_LIBRARY(late, m) {
  m.def("start(int num_devices) -> ()", &start);
  m.def("set_capacity(int bytes) -> ()", &set_capacity);
  m.def("set_delays(int seed, int kernel_us, int copy_us) -> ()", &set_delays);
  m.def("hold(bool is_copy, bool is_held) -> ()", &hold);
  m.def("read_counters(int device) -> str", &read_counters);
  m.def("reset_counters(bool has_stacks) -> ()", &reset_counters);
  m.def("set_tracing(bool is_on) -> ()", &set_tracing);
  m.def("read_trace() -> str", &read_trace);
  m.def("note_host(str kind, str name, int id, int[] reads, int[] writes) -> ()", &note_host);
  m.def("contexts() -> int[]", &contexts);
  m.def("forget_contexts() -> ()", &forget_contexts);
  m.def("memory_info(int device) -> int[]", &memory_info);
  m.def("get_rng_state(int device) -> Tensor", &get_rng_state);
  m.def("set_rng_state(int device, Tensor state) -> ()", &set_rng_state);
  m.def("manual_seed(int device, int seed) -> ()", &manual_seed);
  m.def("communicator(int world, str name, int size) -> int", &communicator);
  m.def("fail_world(int world, str message) -> ()", &fail_world);
  m.def(
      "collective(int communicator, str kind, int rank, Tensor(a!) out, Tensor input, int source, "
      "int stream, float timeout_s) -> ()");
  m.def("drain() -> ()", &drain);
  m.def("forget_errors() -> ()", &forget_errors);
}

TORCH_LIBRARY_IMPL(late, CompositeExplicitAutograd, m) { m.impl("collective", &collective); }

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("as_strided", &as_strided);
  m.impl("view", &view);
  m.impl("_reshape_alias", &reshape_alias);
  m.impl("unfold", TORCH_FN(at::native::unfold));
  m.impl("view_as_real", TORCH_FN(at::native::view_as_real));
  m.impl("view_as_complex", TORCH_FN(at::native::view_as_complex));
  m.impl("resize_", &resize);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &local_scalar);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("set_.source_Storage", &set_source_storage);
  m.impl("set_.source_Tensor", &set_source_tensor);
  m.impl("set_", &set_nothing);
  m.impl("record_stream", &record_stream);
  m.impl("_has_compatible_shallow_copy_type", &is_compatible);
  m.impl("_fused_sdp_choice", &sdp_choice);
  // torch prefers a composite kernel to the fallback. Two kinds of operators use the fallback here:
  // those on lists (one kernel on an accelerator), and those with a CPU kernel (the CPU's bits).
  auto& dispatcher = c10::Dispatcher::singleton();
  for (auto& name : dispatcher.getAllOpNames()) {
    if (name.name.rfind("aten::", 0) != 0) continue;
    auto op = dispatcher.findOp(name);
    if (!op || !op->hasSchema() || op->hasKernelForDispatchKey(c10::DispatchKey::PrivateUse1))
      continue;
    bool is_list = name.name.rfind("aten::_foreach_", 0) == 0 &&
                   name.overload_name.find("out") == std::string::npos;
    bool has_both = op->hasKernelForDispatchKey(c10::DispatchKey::CPU) &&
                    op->hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd);
    if (!is_list && !has_both) continue;
    bool is_view = false;
    for (auto& result : op->schema().returns()) {
      is_view = is_view || (result.alias_info() && !result.alias_info()->isWrite());
    }
    if (is_view) continue;
    std::string full =
        name.name.substr(6) + (name.overload_name.empty() ? "" : "." + name.overload_name);
    m.impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&fallback>());
  }
}

}  // namespace late

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &late::sdp_choice)
}
