// Chooses the instruction set once a process: the best that the processor has, or the one that PAGEGRAFT_ISA names.
#include <cstdlib>
#include <cstring>

#include "paged_attention.h"
#include "work.h"

namespace pagegraft {
namespace {

bool has_avx2() {
#if defined(__x86_64__) || defined(__i386__)
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
#else
  return false;
#endif
}

bool has_avx512() {
#if defined(__x86_64__) || defined(__i386__)
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
#else
  return false;
#endif
}

bool has_avx512vbmi() {
#if defined(__x86_64__) || defined(__i386__)
  return has_avx512() && __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512vnni");
#else
  return false;
#endif
}

struct Choice {
  const Isa* isa = nullptr;
  const char* name = "naive";
  std::string error;
};

Choice choose() {
  const Isa* usable[] = {has_avx512vbmi() ? avx512vbmi_isa() : nullptr, has_avx512() ? avx512_isa() : nullptr,
                         has_avx2() ? avx2_isa() : nullptr, neon_isa(), scalar_isa()};
  const char* wanted = std::getenv("PAGEGRAFT_ISA");
  Choice choice;
  if (wanted != nullptr && std::strcmp(wanted, "naive") == 0) return choice;
  std::string names = "naive";
  for (const Isa* isa : usable) {
    if (isa == nullptr) continue;
    names += std::string(", ") + isa->name;
    const bool match = wanted == nullptr || *wanted == '\0' || std::strcmp(wanted, isa->name) == 0;
    if (match && choice.isa == nullptr) {
      choice.isa = isa;
      choice.name = isa->name;
    }
  }
  if (choice.isa == nullptr) {
    choice.error = std::string("environment variable PAGEGRAFT_ISA: expected one of ") + names +
                   ", which this processor and build have, got '" + wanted + "'";
  }
  return choice;
}

const Choice& choice() {
  static const Choice chosen = choose();
  return chosen;
}

}  // namespace

const Isa* chosen_isa() { return choice().isa; }
const char* isa_name() { return choice().name; }
std::string isa_error() { return choice().error; }

}  // namespace pagegraft
