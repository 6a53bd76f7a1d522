// Random calls, most of them malformed in one or a few places, through the kernel core. Every tensor is an allocation of
// exactly its size, so that AddressSanitizer sees each access outside of it; a call must end in an error message or
// leave every cache slot that is not in its slot mapping as it was.
//
//   pagegraft_fuzz COUNT [SEED]
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <set>
#include <vector>

#include "random_call.h"

namespace {

using namespace pagegraft;

[[noreturn]] void fail(const char* what) {
  std::fprintf(stderr, "fuzz: %s\n", what);
  std::abort();
}

// Slots that this call may write.
std::set<std::int64_t> written(RandomCall* random, const Sizes& s) {
  std::set<std::int64_t> slots;
  for (std::int64_t i = 0; i < s.S; ++i) {
    const std::int32_t* cumulative = random->ints(contract::kCumulativeSequenceLength);
    for (std::int64_t t = cumulative[i]; t < cumulative[i + 1]; ++t) {
      const std::int64_t position = random->ints(contract::kPastSeqlens)[i] + t - cumulative[i];
      const std::int64_t block = random->ints(contract::kBlockTable)[i * s.M + position / s.B];
      const std::int64_t derived = block < 0 ? -1 : block * s.B + position % s.B;
      slots.insert(random->call().in[contract::kSlotMapping].present ? random->ints(contract::kSlotMapping)[t] : derived);
    }
  }
  return slots;
}

void run_and_check(RandomCall* random, const Sizes& s) {
  const Config& config = random->config();
  Call& call = random->call();
  const Tensor& k = call.in[contract::kKeyCache];
  const std::int64_t row = k.dims[2] * k.dims[3] * element_size(config.cache);
  const auto* keys = static_cast<const char*>(k.data);
  const std::vector<char> before(keys, keys + s.N * s.B * row);
  std::unique_ptr<char[]> output(new char[static_cast<std::size_t>(s.T * s.H * s.Dv * element_size(config.compute))]);
  call.output = output.get();
  call.key_cache = const_cast<void*>(k.data);
  call.value_cache = config.latent ? call.key_cache : const_cast<void*>(call.in[contract::kValueCache].data);
  call.k_scale = static_cast<float*>(const_cast<void*>(call.in[contract::kKScale].data));
  call.v_scale = static_cast<float*>(const_cast<void*>(call.in[contract::kVScale].data));
  const Parallel serial{[](void*, std::int64_t count, void (*body)(void*, std::size_t), void* data) {
                          for (std::int64_t i = 0; i < count; ++i) body(data, static_cast<std::size_t>(i));
                        },
                        nullptr};
  const std::string error = run(config, call, s, serial);
  if (!error.empty()) fail(error.c_str());
  const std::set<std::int64_t> slots = written(random, s);
  for (std::int64_t i = 0; i < s.N * s.B; ++i) {
    if (slots.count(i) == 0 && std::memcmp(before.data() + i * row, keys + i * row, static_cast<std::size_t>(row)) != 0) {
      fail("a key was written outside the slot mapping");
    }
  }
}

// Returns 1 when the call was accepted and run, 0 when it was refused.
int run_one(RandomCall* random) {
  random->make();
  Sizes sizes;
  const Config& config = random->config();
  if (!check_config(config).empty() || !check_shapes(config, random->call(), &sizes).empty() ||
      !check_values(config, random->call(), sizes).empty()) {
    return 0;
  }
  run_and_check(random, sizes);
  return 1;
}

}  // namespace

int main(int argc, char** argv) {
  const long count = argc > 1 ? std::strtol(argv[1], nullptr, 10) : 10000;
  const std::uint64_t seed = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 1;
  if (!isa_error().empty()) {
    std::fprintf(stderr, "%s\n", isa_error().c_str());
    return 1;
  }
  RandomCall random(seed);
  long accepted = 0;
  for (long i = 0; i < count; ++i) accepted += run_one(&random);
  std::printf("%s: %ld calls, %ld of them run, the rest refused\n", isa_name(), count, accepted);
  return 0;
}
