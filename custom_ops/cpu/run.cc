// Runs one call: new keys and values are written first, then every unit of the plan is attended by whichever thread is
// free. The last unit of a group to end merges the group.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <new>

#include "naive.h"
#include "paged_attention.h"
#include "plan.h"
#include "step.h"
#include "work.h"

namespace pagegraft {

Scratch::~Scratch() { std::free(memory_); }

float* Scratch::reserve(std::int64_t floats) {
  if (floats > size_) {
    std::free(memory_);
    size_ = 0;
    memory_ = std::malloc(static_cast<std::size_t>(floats) * sizeof(float) + 64);
    if (memory_ == nullptr) throw std::bad_alloc();
    const auto address = reinterpret_cast<std::uintptr_t>(memory_);
    aligned_ = reinterpret_cast<float*>((address + 63) / 64 * 64);
    size_ = floats;
  }
  return aligned_;
}

namespace {

// Tokens of a write task, and the amounts of work below which a parallel loop costs more than it gains.
constexpr std::int64_t kWriteTokens = 16;
constexpr std::int64_t kSerialWriteElements = 16 * 1024;
constexpr std::int64_t kSerialCost = 16 * 1024;

Scratch& thread_scratch() {
  thread_local Scratch scratch;
  return scratch;
}

struct Job {
  const Step* step = nullptr;
  const Isa* isa = nullptr;
  const Plan* plan = nullptr;
  float* partials = nullptr;
  std::atomic<std::int32_t>* pending = nullptr;  // units of each group still to end
  std::atomic<std::int64_t> next{0};
  std::atomic<bool> out_of_memory{false};
};

// First packed token of write task `i`, in whole sequences' terms: tasks cover [i * kWriteTokens, ...) of all tokens.
void write_range(const Job& job, std::int64_t first, std::int64_t last) {
  const Step& step = *job.step;
  std::int64_t sequence =
      std::upper_bound(step.cumulative, step.cumulative + step.sizes.S + 1, static_cast<std::int32_t>(first)) -
      step.cumulative - 1;
  while (first < last) {
    const std::int64_t end = std::min<std::int64_t>(last, step.cumulative[sequence + 1]);
    if (end > first) job.isa->write(step, sequence, first, end, &thread_scratch());
    first = std::max(first, end);
    ++sequence;
  }
}

void write_body(void* data, std::size_t index) {
  Job& job = *static_cast<Job*>(data);
  const auto first = static_cast<std::int64_t>(index) * kWriteTokens;
  try {
    write_range(job, first, std::min(first + kWriteTokens, job.step->sizes.T));
  } catch (const std::bad_alloc&) {
    job.out_of_memory = true;
  }
}

void attend_unit(Job* job, const Unit& unit) {
  const Step& step = *job->step;
  const Group& group = job->plan->groups[static_cast<std::size_t>(unit.group)];
  Scratch& scratch = thread_scratch();
  float* partials = group.ranges > 1 ? job->partials + group.partial : nullptr;
  float* mine = partials == nullptr ? nullptr : partials + unit.range * partial_size(step, group);
  (group.few ? job->isa->attend_few : job->isa->attend_many)(step, group, unit, mine, &scratch);
  if (partials == nullptr) return;
  if (job->pending[unit.group].fetch_sub(1, std::memory_order_acq_rel) == 1) {
    job->isa->merge(step, group, partials, &scratch);
  }
}

// Takes units until none are left: the loop's own index means nothing, so that costs need not be equal.
void attend_body(void* data, std::size_t) {
  Job& job = *static_cast<Job*>(data);
  const auto count = static_cast<std::int64_t>(job.plan->units.size());
  try {
    for (std::int64_t i = job.next++; i < count; i = job.next++) {
      attend_unit(&job, job.plan->units[static_cast<std::size_t>(i)]);
    }
  } catch (const std::bad_alloc&) {
    job.out_of_memory = true;
  }
}

void write_all(Job* job, const Parallel& parallel) {
  const Sizes& s = job->step->sizes;
  const std::int64_t tasks = (s.T + kWriteTokens - 1) / kWriteTokens;
  if (tasks <= 1 || s.T * s.G * (s.D + s.Dv) <= kSerialWriteElements) {
    write_range(*job, 0, s.T);
  } else {
    parallel.run(parallel.context, tasks, write_body, job);
  }
}

void attend_all(Job* job, const Parallel& parallel) {
  const Plan& plan = *job->plan;
  thread_local Scratch partial_scratch;
  job->partials = partial_scratch.reserve(plan.partial_floats);
  const std::unique_ptr<std::atomic<std::int32_t>[]> pending(new std::atomic<std::int32_t>[plan.groups.size() + 1]);
  for (std::size_t i = 0; i < plan.groups.size(); ++i) pending[i] = plan.groups[i].ranges;
  job->pending = pending.get();
  if (plan.units.size() <= 1 || plan.cost <= kSerialCost) {
    attend_body(job, 0);
  } else {
    parallel.run(parallel.context, static_cast<std::int64_t>(plan.units.size()), attend_body, job);
  }
}

// Static key scales are folded into the query; a scale so large that this could overflow goes to the oracle kernel,
// which multiplies code and scale first.
bool needs_naive(const Step& step) {
  if (step.config.k_quant != Quant::kPerTensor && step.config.k_quant != Quant::kPerChannel) return false;
  const Tensor& t = step.call.in[contract::kKScale];
  const auto* scales = static_cast<const float*>(t.data);
  const std::int64_t n = t.rank == 1 ? t.dims[0] : t.dims[0] * t.dims[1] * t.dims[2];
  return std::any_of(scales, scales + n, [](float s) { return !(std::fabs(s) < 1e18f); });
}

void naive_body(void* data, std::size_t sequence) {
  Job& job = *static_cast<Job*>(data);
  const Step& step = *job.step;
  try {
    NaiveScratch scratch(step.sizes);
    for (std::int64_t t = step.cumulative[sequence]; t < step.cumulative[sequence + 1]; ++t) {
      for (std::int64_t h = 0; h < step.sizes.H; ++h) {
        naive_attend(step, static_cast<std::int64_t>(sequence), t, h, &scratch);
      }
    }
  } catch (const std::bad_alloc&) {
    job.out_of_memory = true;
  }
}

}  // namespace

std::string run(const Config& config, const Call& call, const Sizes& sizes, const Parallel& parallel) {
  if (sizes.T == 0) return {};
  const Step step(config, call, sizes);
  Job job;
  job.step = &step;
  job.isa = chosen_isa();
  if (sizes.N == 0) {  // nothing can be mapped: no row sees a key
    std::memset(call.output, 0, static_cast<std::size_t>(sizes.T * sizes.H * sizes.Dv * element_size(config.compute)));
  } else if (job.isa == nullptr || needs_naive(step)) {
    for (std::int64_t i = 0; i < sizes.S; ++i) naive_write(step, i);
    parallel.run(parallel.context, sizes.S, naive_body, &job);
  } else {
    thread_local Plan plan;
    plan.make(step);
    job.plan = &plan;
    write_all(&job, parallel);
    attend_all(&job, parallel);
  }
  return job.out_of_memory ? "PagedAttention: out of memory for its working space" : "";
}

}  // namespace pagegraft
