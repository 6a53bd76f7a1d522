// Work is cut by what a sequence itself is (its past, its new tokens, the model's shape), never by the number of threads
// or by the other sequences: so results are bitwise the same for any of those. Threads take units as they get free.
//
// Few query rows on a KV head (decoding): one group for the whole sequence, all heads together, cut into ranges of
// kFewRange or kFewRangeLong positions by its length. Many rows (prefill, absorbed latent attention): a group for each KV
// head and about kManyRows query rows, cut into long ranges only where one sequence would otherwise keep a single core
// busy. Ranges lie on a fixed grid.
#include "plan.h"

#include <algorithm>

namespace pagegraft {
namespace {

// A range prepares its query rows and starts with tokens that nobody has fetched ahead, so long ones are faster; short
// ones give a short sequence enough ranges for several cores.
constexpr std::int64_t kFewRange = 512;
constexpr std::int64_t kFewRangeLong = 1024;  // at most kMaxTile of isa/query_rows.inl
constexpr std::int64_t kLongSequence = 2048;
constexpr std::int64_t kManyRows = 512;
constexpr std::int64_t kManyRange = 8192;
constexpr std::int64_t kManyRangeFewTokens = 1024;  // when a step brings so few rows that only ranges can be shared out

// Cost of one key for some rows: reading it, and two products.
std::int64_t key_cost(const Step& step, const Group& group) {
  const std::int64_t rows = rows_of(step, group).all;
  const std::int64_t bytes = group.heads * (step.kv.key.head_stride + step.kv.value.head_stride);
  return 1 + bytes / 8 + rows * (step.sizes.D + step.sizes.Dv) / 32;
}

}  // namespace

void Plan::add_group(const Step& step, Group group, std::int64_t range_length) {
  const std::int64_t total = step.total_tokens(group.sequence);
  const std::int64_t first = step.past[group.sequence] + group.first_token - step.cumulative[group.sequence];
  const std::int64_t begin = visible_range(step.config, first, total).begin;
  const std::int64_t end = visible_range(step.config, first + group.tokens - 1, total).end;
  const std::int64_t first_range = begin / range_length;
  group.ranges = static_cast<std::int32_t>((end - 1) / range_length - first_range + 1);
  group.partial = partial_floats;
  if (group.ranges > 1) partial_floats += (group.ranges * partial_size(step, group) + 15) / 16 * 16;
  const std::int64_t each = key_cost(step, group);
  for (std::int32_t r = 0; r < group.ranges; ++r) {
    Unit unit;
    unit.group = static_cast<std::int32_t>(groups.size());
    unit.range = r;
    unit.begin = std::max(begin, (first_range + r) * range_length);
    unit.end = std::min(end, (first_range + r + 1) * range_length);
    unit.cost = (unit.end - unit.begin) * each;
    cost += unit.cost;
    units.push_back(unit);
  }
  groups.push_back(group);
}

void Plan::add_sequence(const Step& step, std::int64_t sequence) {
  const std::int64_t tokens = step.new_tokens(sequence);
  if (tokens == 0) return;
  const Sizes& s = step.sizes;
  const std::int64_t heads_per_kv = s.H / s.G;
  Group group{};
  group.sequence = static_cast<std::int32_t>(sequence);
  group.first_token = step.cumulative[sequence];
  if (tokens * heads_per_kv <= kFewRows) {
    group.few = true;
    group.tokens = static_cast<std::int32_t>(tokens);
    group.heads = static_cast<std::int32_t>(s.G);
    add_group(step, group, step.total_tokens(sequence) < kLongSequence ? kFewRange : kFewRangeLong);
    return;
  }
  const std::int64_t tile = std::max<std::int64_t>(1, kManyRows / heads_per_kv);
  const std::int64_t range = tokens * heads_per_kv <= kManyRows ? kManyRangeFewTokens : kManyRange;
  group.heads = 1;
  for (std::int64_t t = 0; t < tokens; t += tile) {
    group.first_token = static_cast<std::int32_t>(step.cumulative[sequence] + t);
    group.tokens = static_cast<std::int32_t>(std::min(tile, tokens - t));
    for (std::int64_t g = 0; g < s.G; ++g) {
      group.first_head = static_cast<std::int32_t>(g);
      add_group(step, group, range);
    }
  }
}

void Plan::make(const Step& step) {
  groups.clear();
  units.clear();
  partial_floats = 0;
  cost = 0;
  for (std::int64_t i = 0; i < step.sizes.S; ++i) add_sequence(step, i);
  std::stable_sort(units.begin(), units.end(), [](const Unit& a, const Unit& b) { return a.cost > b.cost; });
}

}  // namespace pagegraft
