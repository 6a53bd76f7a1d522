// AVX-512 as the first server processors with it had it.
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#include "avx512.inl"

namespace pagegraft {
const Isa* avx512_isa() { return &kIsa; }
}  // namespace pagegraft
#else
#include "../work.h"
namespace pagegraft {
const Isa* avx512_isa() { return nullptr; }
}  // namespace pagegraft
#endif
