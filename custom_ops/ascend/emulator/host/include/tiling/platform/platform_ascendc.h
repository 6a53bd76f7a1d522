// Host model of the platform query of a tiling function.
#pragma once
#include "register/op_def_registry.h"

namespace platform_ascendc {

enum class CoreMemType { L0_A, L0_B, L0_C, L1, L2, UB, HBM };

class PlatformAscendC {
public:
    explicit PlatformAscendC(fe::PlatFormInfos* platform) : platform_(platform) {}
    uint32_t GetCoreNumAiv() const { return platform_->vector_cores; }
    uint32_t GetCoreNumAic() const { return platform_->vector_cores / 2; }
    uint32_t GetLibApiWorkSpaceSize() const { return 16 * 1024 * 1024; }
    void GetCoreMemSize(const CoreMemType& type, uint64_t& size) const { size = type == CoreMemType::UB ? platform_->ub_bytes : 0; }

private:
    fe::PlatFormInfos* platform_;
};

}  // namespace platform_ascendc
