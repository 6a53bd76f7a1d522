// Everything about one call that its work units share, computed once on the calling thread.
#pragma once

#include <cstdint>
#include <vector>

#include "kv_view.h"
#include "paged_attention.h"

namespace pagegraft {

// One head vector on its way from the packed inputs to the cache or into the attention.
struct HeadSource {
  const std::uint8_t* base = nullptr;
  std::int64_t token_stride = 0;  // bytes
  std::int64_t head_stride = 0;

  const void* at(std::int64_t token, std::int64_t head) const {
    return base + token * token_stride + head * head_stride;
  }
};

struct Step {
  const Config& config;
  const Call& call;
  const Sizes& sizes;
  HeadSource query, key, value;
  PagedKv kv;
  float scale = 1.f;
  const std::int32_t* cumulative = nullptr;
  const std::int32_t* past = nullptr;
  const std::int32_t* table = nullptr;
  const std::int32_t* slots = nullptr;  // null: derived
  // float32 copies of the small vectors of the compute type; empty when absent
  std::vector<float> sinks, q_norm, k_norm;

  Step(const Config& config, const Call& call, const Sizes& sizes);

  std::int64_t new_tokens(std::int64_t sequence) const { return cumulative[sequence + 1] - cumulative[sequence]; }
  std::int64_t total_tokens(std::int64_t sequence) const { return past[sequence] + new_tokens(sequence); }

  // Block id of a position of a sequence, -1 when unmapped.
  std::int64_t block_of(std::int64_t sequence, std::int64_t position) const {
    return table[sequence * sizes.M + position / sizes.B];
  }

  // Flat slot of packed token `token`, which is at `position` of `sequence`; -1 when it is not to be written.
  std::int64_t slot_of(std::int64_t token, std::int64_t sequence, std::int64_t position) const {
    if (slots != nullptr) return slots[token];
    const std::int64_t block = block_of(sequence, position);
    return block < 0 ? contract::kUnmapped : block * sizes.B + position % sizes.B;
  }

  const std::uint8_t* cos_row(std::int64_t position) const { return rotary_row(contract::kCosCache, position); }
  const std::uint8_t* sin_row(std::int64_t position) const { return rotary_row(contract::kSinCache, position); }

 private:
  const std::uint8_t* rotary_row(std::size_t input, std::int64_t position) const {
    return static_cast<const std::uint8_t*>(call.in[input].data) +
           position * (sizes.rotary_dim / 2) * element_size(config.compute);
  }
};

}  // namespace pagegraft
