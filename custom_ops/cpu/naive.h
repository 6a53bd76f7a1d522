// The oracle kernel; see naive.cc.
#pragma once

#include "step.h"

namespace pagegraft {

struct NaiveScratch {
  std::vector<float> angles, query, row, scores;
  std::vector<double> sums;
  explicit NaiveScratch(const Sizes& sizes);
};

// Writes the new keys and values of one sequence.
void naive_write(const Step& step, std::int64_t sequence);

// Computes output row `token` of query head `head`.
void naive_attend(const Step& step, std::int64_t sequence, std::int64_t token, std::int64_t head,
                  NaiveScratch* scratch);

}  // namespace pagegraft
