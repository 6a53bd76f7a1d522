// The rules of the contract that a call breaks by the numbers in its lengths, block table and slots.
#include "messages.h"
#include "paged_attention.h"

namespace pagegraft {
namespace {

using std::int32_t;
using std::int64_t;
using std::to_string;

std::string check_lengths(const Call& call, const Sizes& s) {
  const auto* cumulative = static_cast<const int32_t*>(call.in[contract::kCumulativeSequenceLength].data);
  const auto* past = static_cast<const int32_t*>(call.in[contract::kPastSeqlens].data);
  if (cumulative[0] != 0) {
    return wrong(contract::kCumulativeSequenceLength, "element 0 to be 0", to_string(cumulative[0]));
  }
  for (int64_t i = 0; i < s.S; ++i) {
    if (cumulative[i + 1] < cumulative[i]) {
      return wrong(contract::kCumulativeSequenceLength, "values that never decrease",
                   to_string(cumulative[i + 1]) + " after " + to_string(cumulative[i]) + " at element " +
                       to_string(i + 1));
    }
  }
  if (cumulative[s.S] != s.T) {
    return wrong(contract::kCumulativeSequenceLength, "its last element to be the number of tokens " + to_string(s.T),
                 to_string(cumulative[s.S]));
  }
  for (int64_t i = 0; i < s.S; ++i) {
    const int64_t total = int64_t{past[i]} + cumulative[i + 1] - cumulative[i];
    if (past[i] < 0) {
      return wrong(contract::kPastSeqlens, "values of at least 0", to_string(past[i]) + " for sequence " + to_string(i));
    }
    if (cumulative[i + 1] > cumulative[i] && total > s.M * s.B) {
      return wrong(contract::kBlockTable,
                   "a row of at least " + to_string((total + s.B - 1) / s.B) + " blocks for the " + to_string(total) +
                       " tokens of sequence " + to_string(i),
                   "shape " + shape_text(call.in[contract::kBlockTable]));
    }
  }
  return {};
}

std::string check_blocks(const Config& c, const Call& call, const Sizes& s) {
  const auto* cumulative = static_cast<const int32_t*>(call.in[contract::kCumulativeSequenceLength].data);
  const auto* past = static_cast<const int32_t*>(call.in[contract::kPastSeqlens].data);
  const auto* table = static_cast<const int32_t*>(call.in[contract::kBlockTable].data);
  for (int64_t i = 0; i < s.S; ++i) {
    const int64_t count = int64_t{cumulative[i + 1]} - cumulative[i];
    if (count == 0) continue;
    const int64_t end = past[i] + count;
    if (c.rotary && end > s.rotary_rows) {
      return wrong(contract::kCosCache,
                   "at least " + to_string(end) + " rows for the positions of sequence " + to_string(i),
                   to_string(s.rotary_rows) + " rows");
    }
    const int64_t begin = c.window > 0 && past[i] + 1 > c.window ? past[i] + 1 - c.window : 0;
    for (int64_t b = begin / s.B; b * s.B < end; ++b) {
      const int64_t id = table[i * s.M + b];
      if (id < contract::kUnmapped || id >= s.N) {
        return wrong(contract::kBlockTable,
                     "block ids from -1 to " + to_string(s.N - 1) + " in the visible range of sequence " + to_string(i),
                     to_string(id) + " at logical block " + to_string(b));
      }
    }
  }
  return {};
}

}  // namespace

std::string check_values(const Config& c, const Call& call, const Sizes& s) {
  std::string error = check_lengths(call, s);
  if (error.empty()) error = check_blocks(c, call, s);
  if (!error.empty() || !call.in[contract::kSlotMapping].present) return error;
  const auto* slots = static_cast<const int32_t*>(call.in[contract::kSlotMapping].data);
  for (int64_t t = 0; t < s.T; ++t) {
    if (slots[t] < contract::kUnmapped || slots[t] >= s.N * s.B) {
      return wrong(contract::kSlotMapping, "slots from -1 to " + to_string(s.N * s.B - 1),
                   to_string(slots[t]) + " for token " + to_string(t));
    }
  }
  return {};
}

}  // namespace pagegraft
