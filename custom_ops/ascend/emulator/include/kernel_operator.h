// The header that Ascend C kernels include. Here it is the emulator: a host model, written from the API's documentation,
// of the part of Ascend C that the kernels of this folder use. With CANN installed its own header takes this one's place.
#pragma once
#include "emu/cube.h"

namespace emu {
inline uint8_t* UserWorkspace(uint8_t* workspace) { return workspace; }
}  // namespace emu

namespace AscendC {
__aicore__ inline GM_ADDR GetUserWorkspace(GM_ADDR workspace) { return emu::UserWorkspace(workspace); }
}  // namespace AscendC

enum KernelMetaType { KERNEL_TYPE_AIV_ONLY, KERNEL_TYPE_AIC_ONLY, KERNEL_TYPE_MIX_AIV_1_0, KERNEL_TYPE_MIX_AIC_1_1, KERNEL_TYPE_MIX_AIC_1_2 };
#define KERNEL_TASK_TYPE_DEFAULT(type) static_cast<void>(type)
#define REGISTER_TILING_DEFAULT(Struct) static_assert(std::is_trivially_copyable_v<Struct>, "tiling data is copied as bytes")
#define GET_TILING_DATA_WITH_STRUCT(Struct, name, address) \
    Struct name;                                           \
    std::memcpy(&name, address, sizeof(name))
