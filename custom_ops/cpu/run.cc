#include <new>

#include "naive.h"
#include "paged_attention.h"
#include "step.h"

namespace pagegraft {
namespace {

struct NaiveJob {
  const Step* step;
};

void naive_body(void* data, std::size_t sequence) {
  const Step& step = *static_cast<NaiveJob*>(data)->step;
  NaiveScratch scratch(step.sizes);
  for (std::int64_t t = step.cumulative[sequence]; t < step.cumulative[sequence + 1]; ++t) {
    for (std::int64_t h = 0; h < step.sizes.H; ++h) {
      naive_attend(step, static_cast<std::int64_t>(sequence), t, h, &scratch);
    }
  }
}

}  // namespace

const char* isa_name() { return "naive"; }
std::string isa_error() { return {}; }

std::string run(const Config& config, const Call& call, const Sizes& sizes, const Parallel& parallel) {
  const Step step(config, call, sizes);
  for (std::int64_t i = 0; i < sizes.S; ++i) naive_write(step, i);
  NaiveJob job{&step};
  parallel.run(parallel.context, sizes.S, naive_body, &job);
  return {};
}

}  // namespace pagegraft
