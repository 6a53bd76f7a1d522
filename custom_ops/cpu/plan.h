// Cuts one call into units of work; see plan.cc.
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "work.h"

namespace pagegraft {

struct Plan {
  std::vector<Group> groups;
  std::vector<Unit> units;  // most expensive first
  std::int64_t partial_floats = 0;
  std::int64_t cost = 0;  // about nanoseconds on one core

  void make(const Step& step);

 private:
  void add_group(const Step& step, Group group, std::int64_t range_length);
  void add_sequence(const Step& step, std::int64_t sequence);
};

}  // namespace pagegraft
