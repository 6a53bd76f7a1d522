// How the checks word what is wrong: the thing, what is expected, what was given.
#pragma once

#include <string>

#include "paged_attention.h"

namespace pagegraft {

inline std::string shape_text(const Tensor& t) {
  std::string text = "[";
  for (int i = 0; i < t.rank; ++i) text += (i ? ", " : "") + std::to_string(t.dims[i]);
  return text + "]";
}

inline std::string wrong(std::size_t input, const std::string& expected, const std::string& got) {
  return std::string("PagedAttention input '") + contract::kInputNames[input] + "': expected " + expected + ", got " +
         got;
}

inline std::string wrong_attribute(const char* name, const std::string& expected, const std::string& got) {
  return std::string("PagedAttention attribute '") + name + "': expected " + expected + ", got " + got;
}

}  // namespace pagegraft
