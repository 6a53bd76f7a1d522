// What this machine can do at most, for op_bench.py: bytes read a second and float32 multiply-adds a second of one
// thread. Compiled with -march=native by the bench, called from as many threads as are measured.
#include <chrono>
#include <cstddef>
#include <cstdint>

namespace {
double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}
#if defined(__AVX512F__)
#define PAGEGRAFT_KEEP(x) "+v"(x)
constexpr int kLanes = 16;
#elif defined(__AVX__)
#define PAGEGRAFT_KEEP(x) "+x"(x)
constexpr int kLanes = 8;
#else
#define PAGEGRAFT_KEEP(x) "+w"(x)
constexpr int kLanes = 4;
#endif
typedef float Vector __attribute__((vector_size(kLanes * 4), aligned(4)));
}  // namespace

// Seconds to read `bytes` at `data` once, with hardware prefetching at its best: four streams of whole cache lines.
extern "C" double read_seconds(const void* data, std::size_t bytes) {
  const auto* p = static_cast<const float*>(data);
  const std::size_t n = bytes / 4 / 4;
  Vector sum[8];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) sum[i] = Vector{};
  const double start = now();
  for (std::size_t i = 0; i + 2 * kLanes <= n; i += 2 * kLanes) {
#pragma GCC unroll 4
    for (int s = 0; s < 4; ++s) {
      sum[2 * s] += *reinterpret_cast<const Vector*>(p + s * n + i);
      sum[2 * s + 1] += *reinterpret_cast<const Vector*>(p + s * n + i + kLanes);
    }
  }
  const double seconds = now() - start;
#pragma GCC unroll 8
  for (int i = 1; i < 8; ++i) sum[0] += sum[i];
  volatile float keep = sum[0][0];
  static_cast<void>(keep);
  return seconds;
}

// Seconds for `rounds` times 12 independent vector multiply-adds; `*flops` gets their number of operations.
extern "C" double fma_seconds(std::int64_t rounds, double* flops) {
  // Every loop over the accumulators is unrolled, or the compiler would keep them in memory.
  Vector acc[12];
  Vector a, b;
  for (int i = 0; i < kLanes; ++i) {
    a[i] = 0.999f;
    b[i] = 0.001f;
  }
#pragma GCC unroll 12
  for (int i = 0; i < 12; ++i) acc[i] = b;
  const double start = now();
  for (std::int64_t r = 0; r < rounds; ++r) {
#pragma GCC unroll 12
    for (int i = 0; i < 12; ++i) {
      acc[i] = acc[i] * a + b;
      asm volatile("" : PAGEGRAFT_KEEP(acc[i]));
    }
  }
  const double seconds = now() - start;
#pragma GCC unroll 12
  for (int i = 1; i < 12; ++i) acc[0] += acc[i];
  volatile float keep = acc[0][0];
  static_cast<void>(keep);
  *flops = static_cast<double>(rounds) * 12 * kLanes * 2;
  return seconds;
}
