// Attributes of an onnxruntime node as the kernel's Config; see node_config.cc.
#pragma once

#include <string>

#include "ort_abi.h"
#include "paged_attention.h"

namespace pagegraft {

// Fills `config`, whose domain and types are set already. Returns an empty string, or why the node is refused.
std::string read_config(const ort::Api* api, const ort::KernelInfo* info, Config* config);

}  // namespace pagegraft
