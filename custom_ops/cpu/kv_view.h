// Where the rows of a paged cache lie: strides only, the layout is decided by whoever fills the view.
#pragma once

#include <cstdint>

#include "paged_attention.h"

namespace pagegraft {

// One cache tensor `[N, B, G, width]`. A row is one token's vector of one head.
struct KvView {
  const std::uint8_t* base = nullptr;
  std::int64_t block_stride = 0;  // bytes
  std::int64_t token_stride = 0;
  std::int64_t head_stride = 0;
  Type type = Type::kFloat32;

  static KvView of(const void* base, Type type, std::int64_t block_size, std::int64_t heads, std::int64_t width) {
    const std::int64_t row = width * element_size(type);
    return {static_cast<const std::uint8_t*>(base), row * heads * block_size, row * heads, row, type};
  }

  // 64-bit from the moment an id is loaded: block ids times strides pass 2^31.
  const std::uint8_t* token(std::int64_t block, std::int64_t offset) const {
    return base + block * block_stride + offset * token_stride;
  }
};

// The caches of a call and the way through the block table of one sequence.
struct PagedKv {
  KvView key;
  KvView value;
  const float* k_scale = nullptr;  // PER_TOKEN `[N, G, B]`, else null
  const float* v_scale = nullptr;
  std::int64_t block_size = 1;
  std::int64_t kv_heads = 1;
};

// Positions [begin, end) that a new token at absolute position `position` sees.
struct VisibleRange {
  std::int64_t begin;
  std::int64_t end;
};

inline VisibleRange visible_range(const Config& config, std::int64_t position, std::int64_t total) {
  const std::int64_t begin = config.window > 0 && position + 1 > config.window ? position + 1 - config.window : 0;
  return {begin, config.causal ? position + 1 : total};
}

}  // namespace pagegraft
