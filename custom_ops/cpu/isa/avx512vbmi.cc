// AVX-512 with VBMI, whose byte permutations look float8 up, and VNNI, which multiplies and adds 16-bit words at once.
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__) && \
    defined(__AVX512VBMI__) && defined(__AVX512VNNI__)
#include "avx512.inl"

namespace pagegraft {
const Isa* avx512vbmi_isa() { return &kIsa; }
}  // namespace pagegraft
#else
#include "../work.h"
namespace pagegraft {
const Isa* avx512vbmi_isa() { return nullptr; }
}  // namespace pagegraft
#endif
