// NCCL's functions over shared memory. A collective is a job of its stream. See [Note: fake CUDA].
//
// A communicator is a shared-memory file of n * n byte streams, one for each ordered pair of ranks.
// A message begins with a header that identifies the sender's collective. As in NCCL, a job waits
// until ncclCommAbort if a peer is in another collective, stopped or dead. If the peer has aborted,
// the communicator also has an asynchronous error. An aborted job leaves NaN in its outputs.
//
// Optionally, a device runs one collective at a time, in the order of launches, like NCCL's kernels
// when they fill a device. Ranks that launch collectives of two communicators in different orders
// then hang.

#include "fake.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <fcntl.h>
#include <sched.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <stdexcept>

namespace fake {

// Values from nccl.h.
enum Result { success = 0, system_error = 2, invalid_argument = 4, invalid_usage, remote_error };
enum Type { int8, uint8, int32, uint32, int64, uint64, float16, float32, float64, bfloat16 };
enum Reduction { sum, prod, max, min, avg };
struct UniqueId {
  char name[128];
};

constexpr size_t kBox = size_t{1} << 20;  // bytes of a byte stream's ring buffer
constexpr int kSplits = 64;

size_t size_of(int type) {
  constexpr size_t sizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};  // by `Type`
  return type <= bfloat16 ? sizes[type] : 1;
}

struct Header {
  char kind[16];
  uint64_t number;  // number of the collective within its communicator
  uint64_t size;    // bytes of the message
  int64_t type, reduction;

  std::string described() const {
    return std::string(kind) + " of " + std::to_string(size) + " bytes, type " +
           std::to_string(type) + ", no. " + std::to_string(number);
  }
};

struct Box {  // a byte stream from one rank to another
  std::atomic<uint64_t> written, read;
  char bytes[kBox];

  size_t put(const char* data, size_t size) {
    uint64_t at = written, room = kBox - (at - read);
    size = std::min<size_t>({size, room, kBox - at % kBox});
    memcpy(bytes + at % kBox, data, size);
    written = at + size;
    return size;
  }
  size_t take(char* data, size_t size) {
    uint64_t at = read, there = written - at;
    size = std::min<size_t>({size, there, kBox - at % kBox});
    memcpy(data, bytes + at % kBox, size);
    read = at + size;
    return size;
  }
};

struct Split {
  std::atomic<int> num_there;
  int colors[64], keys[64];
};

struct Shared {
  std::atomic<int> num_there;
  char devices[64][16];               // PCI address of each rank's device
  std::atomic<bool> has_aborted[64];  // by rank
  Split splits[kSplits];
};

// The collectives of a device that have not ended, by order of launch.
struct Turns {
  std::mutex mutex;
  std::set<uint64_t> launched;
  uint64_t next = 0;

  uint64_t launch() {
    std::lock_guard lock(mutex);
    return *launched.insert(next++).first;
  }
  bool is_first(uint64_t turn) {
    std::lock_guard lock(mutex);
    return *launched.begin() == turn;
  }
  void end(uint64_t turn) {
    std::lock_guard lock(mutex);
    launched.erase(turn);
  }
};
Turns* turns = new Turns[16];  // by device
std::atomic<bool>& is_one_at_a_time = *new std::atomic<bool>(false);

struct Comm {
  std::string name;
  int size, rank;
  Shared* shared;
  Box* boxes;
  int device = 0;
  std::atomic<bool> is_aborted{false}, is_destroyed{false};
  std::atomic<int> error{success}, num_running{0};
  uint64_t num_collectives = 0;
  int num_splits = 0;

  Box& box(int from, int to) { return boxes[from * size + to]; }
};

// Seconds after which a job that waits for its peers fails. Like NCCL, jobs by default never give
// up. Tests without a watchdog set a limit.
std::atomic<double>& limit_s = *new std::atomic<double>(1e9);

struct Aborted {};

template <typename F>
void wait_until(const Comm& comm, F is_done) {
  auto start = std::chrono::steady_clock::now();
  for (int i = 0; !is_done(); i++) {
    if (comm.is_aborted) throw Aborted();
    std::chrono::duration<double> waited = std::chrono::steady_clock::now() - start;
    if (waited.count() > limit_s)
      throw std::runtime_error("rank " + std::to_string(comm.rank) + " of " + comm.name +
                               " waited too long for its peers");
    if (i < 100) {
      sched_yield();
    } else {
      usleep(100);
    }
  }
}

// Connects a rank to its peers. It is an error if a peer does not join in time or uses this device.
int join(const std::string& name, int size, int rank, Comm** made) {
  auto* comm = *made = new Comm{name, size, rank};
  cudaGetDevice(&comm->device);
  int file = shm_open(("/" + name).c_str(), O_CREAT | O_RDWR, 0600);
  size_t front = (sizeof(Shared) + 4095) / 4096 * 4096;
  size_t bytes = front + sizeof(Box) * size * size;
  if (file < 0 || ftruncate(file, static_cast<off_t>(bytes)) != 0) abort();
  auto* base =
      static_cast<char*>(mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0));
  close(file);
  comm->shared = reinterpret_cast<Shared*>(base);
  comm->boxes = reinterpret_cast<Box*>(base + front);
  auto& devices = comm->shared->devices;
  cudaDeviceGetPCIBusId(devices[rank], sizeof devices[rank], comm->device);
  comm->shared->num_there++;
  try {
    wait_until(*comm, [&] { return comm->shared->num_there >= size; });
  } catch (const std::exception& error) {
    fprintf(stderr, "fake NCCL: %s\n", error.what());
    return system_error;
  }
  if (rank == 0) shm_unlink(("/" + name).c_str());
  std::set<std::string> different(devices, devices + size);
  if (different.size() == static_cast<size_t>(size)) return success;
  fprintf(stderr, "fake NCCL: several ranks of %s use one device\n", name.c_str());
  return invalid_usage;
}

struct Transfer {
  bool is_send;
  int peer;
  char* data;
  Header header;
  size_t done = 0;  // bytes moved, header included
  Header found{};   // the received header

  bool is_done() const { return done == sizeof(Header) + header.size; }

  // Moves as many bytes as it can without waiting and returns whether any moved. If the received
  // header is not the expected one, prints both and waits for ncclCommAbort.
  bool advance(Comm& comm) {
    size_t before = done;
    if (peer == comm.rank) return false;
    Box& box = is_send ? comm.box(comm.rank, peer) : comm.box(peer, comm.rank);
    while (done < sizeof(Header)) {
      auto* bytes = reinterpret_cast<char*>(is_send ? &header : &found) + done;
      size_t size = sizeof(Header) - done;
      size_t moved = is_send ? box.put(bytes, size) : box.take(bytes, size);
      if (moved == 0) return done > before;
      done += moved;
      if (!is_send && done == sizeof(Header) && memcmp(&found, &header, sizeof(Header)) != 0) {
        fprintf(stderr, "fake NCCL: rank %d of %s is in %s, rank %d in %s: both wait\n", comm.rank,
                comm.name.c_str(), header.described().c_str(), peer, found.described().c_str());
        wait_until(comm, [] { return false; });
      }
    }
    while (!is_done()) {
      char* bytes = data + (done - sizeof(Header));
      size_t size = sizeof(Header) + header.size - done;
      size_t moved = is_send ? box.put(bytes, size) : box.take(bytes, size);
      if (moved == 0) break;
      done += moved;
    }
    return done > before;
  }
};

// Runs transfers concurrently, but in order where they share sender and receiver.
void run(Comm& comm, std::vector<Transfer> transfers) {
  std::map<std::pair<bool, int>, std::deque<Transfer*>> lanes;
  std::deque<Transfer*> own_sends;
  for (auto& each : transfers) {
    if (each.peer != comm.rank) {
      lanes[{each.is_send, each.peer}].push_back(&each);
    } else if (each.is_send) {
      own_sends.push_back(&each);
    }
  }
  for (auto& each : transfers) {
    if (each.peer != comm.rank || each.is_send) continue;
    memmove(each.data, own_sends.front()->data, each.header.size);
    own_sends.pop_front();
  }
  wait_until(comm, [&] {
    bool has_moved = true, is_done = true, is_lost = false;
    for (auto& [key, lane] : lanes)
      is_lost |= !lane.empty() && comm.shared->has_aborted[key.second];
    while (has_moved) {
      has_moved = false;
      is_done = true;
      for (auto& [key, lane] : lanes) {
        while (!lane.empty()) {
          has_moved |= lane.front()->advance(comm);
          if (!lane.front()->is_done()) break;
          lane.pop_front();
        }
        is_done &= lane.empty();
      }
    }
    if (is_lost && !is_done) comm.error = remote_error;
    return is_done;
  });
}

template <typename T, typename Sum = T>
void reduce_into(char* target, const std::vector<std::vector<char>>& rows, size_t num, int how) {
  auto* out = reinterpret_cast<T*>(target);
  for (size_t i = 0; i < num; i++) {
    auto at = [&](size_t k) {
      return static_cast<Sum>(reinterpret_cast<const T*>(rows[k].data())[i]);
    };
    Sum value = at(0);
    for (size_t k = 1; k < rows.size(); k++) {  // in rank order
      Sum next = at(k);
      value = how == max    ? (next > value ? next : value)
              : how == min  ? (next < value ? next : value)
              : how == prod ? static_cast<Sum>(value * next)
                            : static_cast<Sum>(value + next);
    }
    if (how == avg) value = static_cast<Sum>(value / static_cast<Sum>(rows.size()));
    out[i] = static_cast<T>(value);
  }
}

using Reduce = void (*)(char*, const std::vector<std::vector<char>>&, size_t, int);
constexpr Reduce reductions[] = {
    reduce_into<int8_t>,           reduce_into<uint8_t>,
    reduce_into<int32_t>,          reduce_into<uint32_t>,
    reduce_into<int64_t>,          reduce_into<uint64_t>,
    reduce_into<c10::Half, float>, reduce_into<float>,
    reduce_into<double>,           reduce_into<c10::BFloat16, float>};  // by `Type`

// ------------------------------------------------------------------------- operations and groups

struct Operation {
  Comm* comm;
  cudaStream_t stream;
  Job job;
  std::vector<Transfer> transfers;                         // empty for a collective
  std::function<void(Comm&, uint64_t number)> collective;  // null for a send or receive
};
thread_local int group_depth = 0;
thread_local std::vector<Operation> group;

// Submits the operations of the outermost group. Sends and receives share a job per communicator.
int end_group() {
  if (--group_depth > 0) return success;
  std::vector<Operation> waiting = std::move(group);
  group.clear();
  for (size_t i = 0; i < waiting.size(); i++) {
    Operation& first = waiting[i];
    if (!first.comm) continue;
    Comm& comm = *first.comm;
    uint64_t number = comm.num_collectives++;
    for (size_t k = i + 1; k < waiting.size() && !first.collective; k++) {
      Operation& other = waiting[k];
      if (other.comm != &comm || other.collective) continue;
      first.transfers.push_back(other.transfers.front());
      auto join_ranges = [](auto& to, auto& from) {
        to.insert(to.end(), from.begin(), from.end());
      };
      join_ranges(first.job.reads, other.job.reads);
      join_ranges(first.job.writes, other.job.writes);
      other.comm = nullptr;
    }
    Turns& own = turns[comm.device];
    uint64_t turn = own.launch();
    first.job.run = [&comm, &own, turn, number, collective = std::move(first.collective),
                     transfers = std::move(first.transfers), writes = first.job.writes] {
      comm.num_running++;
      try {
        wait_until(comm,
                   [&] { return !comm.is_aborted && (!is_one_at_a_time || own.is_first(turn)); });
        collective ? collective(comm, number) : run(comm, transfers);
      } catch (const Aborted&) {
        for (Range out : writes)
          memset(shadow_of(reinterpret_cast<void*>(out.begin)), 0xFF, out.end - out.begin);
      } catch (...) {
        own.end(turn);
        comm.num_running--;
        throw;
      }
      own.end(turn);
      comm.num_running--;
    };
    submit(first.stream, std::move(first.job));
  }
  return success;
}

// Submits an operation, or adds it to the group. As in NCCL, its stream and buffers must be on the
// communicator's device.
int enqueue(Operation operation) {
  const Comm& comm = *operation.comm;
  if (comm.is_aborted || comm.is_destroyed) return invalid_usage;
  bool is_here = device_of_stream(operation.stream) == comm.device;
  for (auto* ranges : {&operation.job.reads, &operation.job.writes})
    for (Range range : *ranges) {
      auto* data = reinterpret_cast<void*>(range.begin);
      is_here &= range.end == range.begin || (is_front(data) && device_of(data) == comm.device);
    }
  if (!is_here) return invalid_argument;
  group_depth++;
  group.push_back(std::move(operation));
  return end_group();
}

Range range(const void* data, size_t size) {
  auto begin = reinterpret_cast<uintptr_t>(data);
  return {begin, begin + size};
}

Header header_of(const char* kind, uint64_t number, size_t size, int type, int how = 0) {
  Header made{};
  snprintf(made.kind, sizeof made.kind, "%s", kind);
  made.number = number;
  made.size = size;
  made.type = type;
  made.reduction = how;
  return made;
}

char* bytes_at(const void* data) { return static_cast<char*>(shadow_of(data)); }

// Sends ``header.size`` bytes at ``input + stride * peer`` to each peer, and stores each peer's
// message at the address that ``place`` returns.
template <typename F>
void exchange(Comm& comm, const Header& header, char* input, size_t stride, F place) {
  std::vector<Transfer> transfers;
  for (int peer = 0; peer < comm.size; peer++) {
    transfers.push_back({true, peer, input + stride * peer, header});
    transfers.push_back({false, peer, place(peer), header});
  }
  run(comm, std::move(transfers));
}

// Receives a slice of every rank's input and reduces the slices in rank order. With ``stride`` 0 a
// slice is the whole input.
void exchange_and_reduce(Comm& comm, const Header& header, char* input, size_t stride, char* out) {
  std::vector<std::vector<char>> rows(comm.size, std::vector<char>(header.size));
  exchange(comm, header, input, stride, [&](int peer) { return rows[peer].data(); });
  size_t num = header.size / size_of(static_cast<int>(header.type));
  reductions[header.type](out, rows, num, static_cast<int>(header.reduction));
}

int broadcast(const void* input, void* out, size_t num, int type, int root, Comm* comm,
              cudaStream_t stream) {
  size_t size = num * size_of(type);
  char *from = bytes_at(input), *to = bytes_at(out);
  Job job{"nccl broadcast", Kind::copy, {range(input, size)}, {range(out, size)}};
  return enqueue({comm, stream, std::move(job), {}, [=](Comm& on, uint64_t number) {
                    Header header = header_of("broadcast", number, size, type);
                    std::vector<Transfer> transfers;
                    for (int peer = 0; peer < on.size && on.rank == root; peer++)
                      if (peer != root) transfers.push_back({true, peer, from, header});
                    if (on.rank != root) transfers.push_back({false, root, to, header});
                    run(on, std::move(transfers));
                    if (on.rank == root && to != from) memcpy(to, from, size);
                  }});
}

int point_to_point(bool is_send, void* data, size_t num, int type, int peer, Comm* comm,
                   cudaStream_t stream) {
  size_t size = num * size_of(type);
  Job job{"nccl send and receive", Kind::copy};
  (is_send ? job.reads : job.writes).push_back(range(data, size));
  Header header = header_of("send", 0, size, type);  // 0: ranks differ in how many sends they make
  return enqueue(
      {comm, stream, std::move(job), {{is_send, peer, bytes_at(data), header}}, nullptr});
}

}  // namespace fake

using namespace fake;

extern "C" {

void fake_nccl_set_limit(double seconds) { limit_s = seconds; }
void fake_nccl_one_at_a_time(int is_on) { is_one_at_a_time = is_on; }

int ncclGetVersion(int* version) {
  *version = 23007;
  return success;
}
int ncclGetUniqueId(UniqueId* id) {
  static std::random_device source;  // a dead process with the same pid may have left its file
  *id = {};
  snprintf(id->name, sizeof id->name, "fake_nccl_%d_%08x%08x", getpid(), source(), source());
  return success;
}
int ncclCommInitRankConfig(Comm** comm, int size, UniqueId id, int rank, void*) {
  if (size > 64) return invalid_argument;
  return join(id.name, size, rank, comm);
}
int ncclCommInitRank(Comm** comm, int size, UniqueId id, int rank) {
  return ncclCommInitRankConfig(comm, size, id, rank, nullptr);
}
int ncclCommInitRankScalable(Comm** comm, int size, int rank, int, UniqueId* ids, void*) {
  return ncclCommInitRankConfig(comm, size, ids[0], rank, nullptr);
}
int ncclCommSplit(Comm* comm, int color, int key, Comm** made, void*) {
  int number = comm->num_splits++;
  if (number >= kSplits) return invalid_argument;
  Split& split = comm->shared->splits[number];
  split.colors[comm->rank] = color;
  split.keys[comm->rank] = key;
  split.num_there++;
  *made = nullptr;
  try {
    wait_until(*comm, [&] { return split.num_there >= comm->size; });
  } catch (...) {
    return system_error;
  }
  if (color < 0) return success;
  int size = 0, rank = 0;
  for (int peer = 0; peer < comm->size; peer++) {
    if (split.colors[peer] != color) continue;
    size++;
    rank += std::pair(split.keys[peer], peer) < std::pair(key, comm->rank);
  }
  std::string name = comm->name + "_" + std::to_string(number) + "_" + std::to_string(color);
  return join(name, size, rank, made);
}
int ncclCommAbort(Comm* comm) {  // cancels the jobs, and waits for those that run
  comm->error = remote_error;
  comm->shared->has_aborted[comm->rank] = true;
  comm->is_aborted = true;
  while (comm->num_running > 0) usleep(100);
  return success;
}
int ncclCommRevoke(Comm* comm, int) { return ncclCommAbort(comm); }
int ncclCommDestroy(Comm* comm) {
  comm->is_destroyed = true;  // not freed: jobs may still use it
  return success;
}
int ncclCommFinalize(Comm*) { return success; }
int ncclCommGetAsyncError(Comm* comm, int* error) {
  *error = comm->error;
  return success;
}
int ncclCommCount(Comm* comm, int* size) {
  *size = comm->size;
  return success;
}
int ncclCommUserRank(Comm* comm, int* rank) {
  *rank = comm->rank;
  return success;
}
const char* ncclGetErrorString(int error) {
  switch (error) {
    case system_error:
      return "a peer of the communicator is missing";
    case invalid_argument:
      return "a stream or buffer is of another device than the communicator";
    case invalid_usage:
      return "the communicator was aborted, or several ranks use one device";
    default:
      return error == success ? "no error" : "a peer has aborted the communicator";
  }
}
const char* ncclGetLastError(Comm*) { return ""; }
int ncclGroupStart() {
  group_depth++;
  return success;
}
int ncclGroupEnd() { return end_group(); }

int ncclAllGather(const void* input, void* out, size_t num, int type, Comm* comm,
                  cudaStream_t stream) {
  size_t size = num * size_of(type);
  char *from = bytes_at(input), *to = bytes_at(out);
  Job job{"nccl all_gather", Kind::copy, {range(input, size)}, {range(out, size * comm->size)}};
  return enqueue({comm, stream, std::move(job), {}, [=](Comm& on, uint64_t number) {
                    exchange(on, header_of("all_gather", number, size, type), from, 0,
                             [=](int peer) { return to + size * peer; });
                  }});
}
int ncclAlltoAll(const void* input, void* out, size_t num, int type, Comm* comm,
                 cudaStream_t stream) {
  size_t size = num * size_of(type);
  char *from = bytes_at(input), *to = bytes_at(out);
  Job job{"nccl all_to_all",
          Kind::copy,
          {range(input, size * comm->size)},
          {range(out, size * comm->size)}};
  return enqueue({comm, stream, std::move(job), {}, [=](Comm& on, uint64_t number) {
                    exchange(on, header_of("all_to_all", number, size, type), from, size,
                             [=](int peer) { return to + size * peer; });
                  }});
}
int ncclReduceScatter(const void* input, void* out, size_t num, int type, int how, Comm* comm,
                      cudaStream_t stream) {
  size_t size = num * size_of(type);
  char *from = bytes_at(input), *to = bytes_at(out);
  Job job{"nccl reduce_scatter", Kind::copy, {range(input, size * comm->size)}, {range(out, size)}};
  return enqueue({comm, stream, std::move(job), {}, [=](Comm& on, uint64_t number) {
                    exchange_and_reduce(on, header_of("reduce_scatter", number, size, type, how),
                                        from, size, to);
                  }});
}
int ncclAllReduce(const void* input, void* out, size_t num, int type, int how, Comm* comm,
                  cudaStream_t stream) {
  size_t size = num * size_of(type);
  char *from = bytes_at(input), *to = bytes_at(out);
  Job job{"nccl all_reduce", Kind::copy, {range(input, size)}, {range(out, size)}};
  return enqueue({comm, stream, std::move(job), {}, [=](Comm& on, uint64_t number) {
                    exchange_and_reduce(on, header_of("all_reduce", number, size, type, how), from,
                                        0, to);
                  }});
}
int ncclBroadcast(const void* input, void* out, size_t num, int type, int root, Comm* comm,
                  cudaStream_t stream) {
  return broadcast(input, out, num, type, root, comm, stream);
}
int ncclBcast(void* data, size_t num, int type, int root, Comm* comm, cudaStream_t stream) {
  return broadcast(data, data, num, type, root, comm, stream);
}
int ncclSend(const void* data, size_t num, int type, int peer, Comm* comm, cudaStream_t stream) {
  return point_to_point(true, const_cast<void*>(data), num, type, peer, comm, stream);
}
int ncclRecv(void* data, size_t num, int type, int peer, Comm* comm, cudaStream_t stream) {
  return point_to_point(false, data, num, type, peer, comm, stream);
}
}
