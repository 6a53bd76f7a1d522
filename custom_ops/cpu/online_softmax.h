// The state of a softmax that sees its scores in pieces: running maximum, sum of exponentials relative to it, and the
// weighted sum of values kept by the caller. Merging two states is the same algebra (Milakov & Gimelshein,
// "Online normalizer calculation for softmax", 2018; Dao et al., "FlashAttention", 2022).
#pragma once

#include <cmath>
#include <limits>

namespace pagegraft {

struct SoftmaxState {
  float max = -std::numeric_limits<float>::infinity();
  float sum = 0.f;

  // Takes another piece in. The caller multiplies its own weighted values by `*mine` and the other's by `*theirs`.
  // A piece without visible keys (maximum -inf) has factor 0, never exp(-inf + inf).
  void merge(const SoftmaxState& other, float* mine, float* theirs) {
    const float top = max > other.max || std::isnan(max) ? max : other.max;
    *mine = factor(max, top);
    *theirs = factor(other.max, top);
    sum = sum * *mine + other.sum * *theirs;
    max = top;
  }

  // Factor for the weighted values that makes them the attention output; a row without visible keys is zeros.
  float finish(const float* sink) {
    float scale = 1.f;
    if (sink != nullptr) {
      float unused;
      merge({*sink, 1.f}, &scale, &unused);
    }
    return sum == 0.f ? 0.f : scale / sum;
  }

 private:
  static float factor(float piece, float top) {
    return piece == -std::numeric_limits<float>::infinity() ? 0.f : std::exp(piece - top);
  }
};

}  // namespace pagegraft
