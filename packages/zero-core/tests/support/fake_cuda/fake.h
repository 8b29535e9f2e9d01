// Declarations that the three fake libraries share.
//
// [Note: fake CUDA]
// A stream is a thread with a queue. An operator, copy or collective is a job that the stream's
// thread runs later. Device memory is mapped at two addresses. Tensors point to the "front", which
// the host cannot access. Jobs access the same memory at its "shadow".
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
int device_of_stream(cudaStream_t stream);
int device_of(const void* front);
// Returns the first error of a job of ``device``. As in CUDA, every later call reports it.
cudaError_t error_of(int device);
// Makes the host wait for a stream. Counters and trace name the wait by `Waiting`, else by ``why``.
cudaError_t synchronize(cudaStream_t stream, const char* why);
void* shadow_of(const void* front);
bool is_front(const void* address);
bool is_pinned(const void* address);
uint64_t mixed(uint64_t value);  // splitmix64
void note(const char* kind, cudaStream_t stream, const std::string& name, std::vector<Range> reads,
          std::vector<Range> writes);
// Overwrites freed memory with NaN in a job of the stream that owns it.
void poison(cudaStream_t stream, void* front, size_t size);
// While it exists, the calling thread is in a torch operator that itself waits for the stream. That
// wait is counted as ``kind``.
struct Waiting {
  explicit Waiting(const char* kind);
  ~Waiting();
  const char* outer;
};
void set_stack_source(std::string (*source)());  // source returns the calling thread's Python stack

}  // namespace fake
