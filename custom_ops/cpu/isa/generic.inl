// The algorithm, once, over the primitives of `Simd`: an instruction set's file defines that struct and includes this.
// Everything has internal linkage, so that no copy compiled for one processor is ever linked in for another.
#include <cmath>
#include <limits>

#include "../online_softmax.h"
#include "../token_rows.h"
#include "../work.h"

#include "vector_math.inl"
#include "query_rows.inl"
#include "finish.inl"
#include "few_state.inl"
#include "few_scores.inl"
#include "few_values.inl"
#include "few_words.inl"
#include "few_word_values.inl"
#include "few_rows.inl"
#include "many_panel.inl"
#include "many_rows.inl"

namespace pagegraft {
namespace {

void write_tokens(const Step& step, std::int64_t sequence, std::int64_t first, std::int64_t last, Scratch* scratch) {
  float* row = scratch->reserve((step.sizes.D > step.sizes.Dv ? step.sizes.D : step.sizes.Dv) + step.sizes.rotary_dim);
  for (std::int64_t t = first; t < last; ++t) {
    write_token(step, t, sequence, step.past[sequence] + t - step.cumulative[sequence], row);
  }
}

const Isa kIsa = {Simd::kName, write_tokens, attend_few, attend_many, merge_group};

}  // namespace
}  // namespace pagegraft
