// One node of one session: turns a KernelContext into a Call and runs it.
#pragma once

#include <cstdint>
#include <utility>

#include "ort_abi.h"
#include "paged_attention.h"

namespace pagegraft {

class Kernel {
 public:
  Kernel(const ort::Api* api, Config config, std::size_t inputs, std::size_t outputs)
      : api_(api), config_(std::move(config)), inputs_(inputs), outputs_(outputs) {}

  const ort::Api* api() const { return api_; }

  ort::Status* compute(ort::KernelContext* context) const;

 private:
  ort::Status* read_inputs(ort::KernelContext* context, Call* call) const;
  ort::Status* read_tensor(const ort::Value* value, std::size_t index, Tensor* tensor) const;
  ort::Status* make_outputs(ort::KernelContext* context, const Sizes& sizes, Call* call) const;
  ort::Status* alias(ort::KernelContext* context, std::size_t output, const Tensor& input, std::int64_t size,
                     void** data) const;

  const ort::Api* api_;
  Config config_;
  std::size_t inputs_;
  std::size_t outputs_;
};

}  // namespace pagegraft
