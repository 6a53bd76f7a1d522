// Indices, names and limits of the PagedAttention contract.
// Generated from spec.py by `python -m pagegraft.custom_ops.generate`; do not edit.
#pragma once

#include <cstddef>
#include <cstdint>

namespace pagegraft::contract {

inline constexpr const char* kOpType = "PagedAttention";
inline constexpr const char* kMicrosoftDomain = "com.microsoft";
inline constexpr const char* kPagegraftDomain = "pagegraft";
inline constexpr int kOpVersion = 1;
inline constexpr std::int64_t kUnmapped = -1;
inline constexpr std::int64_t kMaxBlockSize = 512;

enum In : std::size_t {
  kQuery = 0,
  kKey = 1,
  kValue = 2,
  kKeyCache = 3,
  kValueCache = 4,
  kCumulativeSequenceLength = 5,
  kPastSeqlens = 6,
  kBlockTable = 7,
  kCosCache = 8,
  kSinCache = 9,
  kSlotMapping = 10,
  kHeadSink = 11,
  kQNormWeight = 12,
  kKNormWeight = 13,
  kKScale = 14,
  kVScale = 15,
  kAttentionMetadata = 16,
  kInputCount = 17,
};

enum Out : std::size_t {
  kOutput = 0,
  kKeyCacheOut = 1,
  kValueCacheOut = 2,
  kKScaleOut = 4,
  kVScaleOut = 5,
  kMicrosoftOutputCount = 3,
  kOutputCount = 6,
};

inline constexpr const char* kInputNames[] = {
    "query",
    "key",
    "value",
    "key_cache",
    "value_cache",
    "cumulative_sequence_length",
    "past_seqlens",
    "block_table",
    "cos_cache",
    "sin_cache",
    "slot_mapping",
    "head_sink",
    "q_norm_weight",
    "k_norm_weight",
    "k_scale",
    "v_scale",
    "attention_metadata",
};

inline constexpr const char* kOutputNames[] = {
    "output",
    "key_cache_out",
    "value_cache_out",
    "",
    "k_scale_out",
    "v_scale_out",
};

inline constexpr bool kInputOptional[] = {
    false,  // query
    true,  // key
    true,  // value
    false,  // key_cache
    true,  // value_cache
    false,  // cumulative_sequence_length
    false,  // past_seqlens
    false,  // block_table
    true,  // cos_cache
    true,  // sin_cache
    true,  // slot_mapping
    true,  // head_sink
    true,  // q_norm_weight
    true,  // k_norm_weight
    true,  // k_scale
    true,  // v_scale
    true,  // attention_metadata
};

}  // namespace pagegraft::contract
