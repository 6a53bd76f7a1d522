// How one call is cut into work, and what a unit of work gets from its caller. See plan.cc for the cutting.
#pragma once

#include <cstdint>

#include "step.h"

namespace pagegraft {

// Results over the same query rows: one group. With one range the unit writes the output itself; with several each
// leaves a partial, and whichever unit ends last merges them in the order of the ranges.
struct Group {
  std::int32_t sequence;
  std::int32_t first_token;  // packed row
  std::int32_t tokens;
  std::int32_t first_head, heads;  // KV heads
  std::int32_t ranges;
  bool few;  // few query rows on a KV head, see plan.cc
  std::int64_t partial;  // float offset of the first range's partials
};

struct Unit {
  std::int32_t group;
  std::int32_t range;
  std::int64_t begin, end;  // KV positions
  std::int64_t cost;
};

// Query rows of a group are ordered (KV head, token, query head within the KV head).
struct RowCount {
  std::int64_t per_head;  // rows that share one KV head
  std::int64_t all;
};

inline RowCount rows_of(const Step& step, const Group& group) {
  const std::int64_t per_head = group.tokens * (step.sizes.H / step.sizes.G);
  return {per_head, per_head * group.heads};
}

// A partial: for each row the maximum, the sum and Dv weighted values, in that order of arrays.
inline std::int64_t partial_size(const Step& step, const Group& group) {
  return rows_of(step, group).all * (2 + step.sizes.Dv);
}

// What one instruction set provides. `scratch` grows as needed and belongs to the calling thread.
class Scratch;

struct Isa {
  const char* name;
  // Writes keys and values of packed tokens [first, last) of a sequence.
  void (*write)(const Step& step, std::int64_t sequence, std::int64_t first, std::int64_t last, Scratch* scratch);
  // Attends over one range; few query rows share each key.
  void (*attend_few)(const Step& step, const Group& group, const Unit& unit, float* partial, Scratch* scratch);
  // The same for many query rows: tiles of keys by panels of rows.
  void (*attend_many)(const Step& step, const Group& group, const Unit& unit, float* partial, Scratch* scratch);
  // Merges a group's partials and writes its output rows.
  void (*merge)(const Step& step, const Group& group, const float* partials, Scratch* scratch);
};

// Sequences with at most this many query rows on a KV head take `attend_few`.
inline constexpr std::int64_t kFewRows = 8;

// Memory of one thread, kept between calls: 64-byte aligned floats handed out in order.
class Scratch {
 public:
  Scratch() = default;
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  ~Scratch();

  // Room for `floats`, valid until the next call. Throws std::bad_alloc.
  float* reserve(std::int64_t floats);

 private:
  void* memory_ = nullptr;
  float* aligned_ = nullptr;
  std::int64_t size_ = 0;
};

const Isa* scalar_isa();
const Isa* avx2_isa();    // null where it was not compiled
const Isa* avx512_isa();
const Isa* avx512vbmi_isa();
const Isa* neon_isa();

// The instruction set of this process; null for the naive kernel.
const Isa* chosen_isa();

}  // namespace pagegraft
