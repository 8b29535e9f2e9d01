// What the three fake libraries share: jobs on streams, and the two addresses of device memory.
//
// [Note: fake CUDA]
// A stream is a thread with a queue. An operator, copy or collective is a job of a stream: it runs
// the CPU's kernel, later. The host sees device memory at addresses that it may not touch (the
// "front"), jobs see the same memory at other addresses (the "shadow"). torch's own allocator,
// streams, autograd threads and ProcessGroupNCCL run above this unchanged.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace fake {

struct Range {
  uintptr_t begin, end;
};

enum class Kind { kernel, copy, silent };  // a silent job has no delay and is not counted

struct Job {
  std::string name;
  Kind kind = Kind::kernel;
  std::vector<Range> reads, writes;  // front addresses of the device, or host addresses
  std::function<void()> run;
};

void submit(cudaStream_t stream, Job job);
// The host waits for a stream. ``why`` is the kind that counters and the trace name.
cudaError_t synchronize(cudaStream_t stream, const char* why);
void* shadow_of(const void* front);
bool is_front(const void* address);
bool is_pinned(const void* address);
uint64_t mixed(uint64_t value);  // splitmix64
void note(const char* kind, cudaStream_t stream, const std::string& name, std::vector<Range> reads,
          std::vector<Range> writes);
// Freed memory turns into NaN in the order of the stream that owns it.
void poison(cudaStream_t stream, void* front, size_t size);
// While one lives, this thread is in an operator of torch's that waits for the device by itself.
struct Waiting {
  explicit Waiting(const char* kind);
  ~Waiting();
};
void set_stack_source(std::string (*source)());  // returns the Python stack of the calling thread

}  // namespace fake
