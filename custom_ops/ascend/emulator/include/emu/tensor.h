// GlobalTensor and LocalTensor: addresses with extents. A LocalTensor knows the end of the buffer it came from.
#pragma once
#include "instruction.h"
#include "types.h"

#define __aicore__
#define __global__
#define __gm__
#define GM_ADDR uint8_t*

namespace AscendC {

using TEventID = int32_t;

enum class TPosition : uint8_t { GM, A1, A2, B1, B2, C1, C2, CO1, CO2, VECIN, VECOUT, VECCALC, C2PIPE2GM, TSCM };

template <typename T>
class GlobalTensor {
public:
    using PrimType = T;
    void SetGlobalBuffer(__gm__ T* buffer, uint64_t elements) {
        base_ = buffer;
        limit_ = buffer + elements;
    }
    void SetGlobalBuffer(__gm__ T* buffer) {
        base_ = buffer;
        limit_ = nullptr;
    }
    GlobalTensor operator[](uint64_t offset) const {
        GlobalTensor result = *this;
        result.base_ = base_ + offset;
        return result;
    }
    const __gm__ T* GetPhyAddr() const { return base_; }
    const __gm__ T* GetPhyAddr(uint64_t offset) const { return base_ + offset; }
    uint64_t GetSize() const { return limit_ == nullptr ? 0 : static_cast<uint64_t>(limit_ - base_); }

    // Scalar load through the data cache.
    T GetValue(uint64_t offset) const {
        emu::Instruction read(emu::kS, "GlobalTensor::GetValue");
        EmuCheck(offset * sizeof(T), sizeof(T), read.name());
        read.ReadGm(base_ + offset, sizeof(T));
        ++read.core().stats.scalar_gm_reads;
        T value;
        std::memcpy(&value, base_ + offset, sizeof(T));
        return value;
    }

    // Checks [byte offset, + bytes) against the length given to SetGlobalBuffer.
    void EmuCheck(uint64_t offset, uint64_t bytes, const char* who) const {
        if (base_ == nullptr) { emu::Fail("gm-bounds", "%s on a GlobalTensor without buffer", who); }
        const uint8_t* start = reinterpret_cast<const uint8_t*>(base_) + offset;
        if (limit_ != nullptr && start + bytes > reinterpret_cast<const uint8_t*>(limit_)) {
            emu::Fail("gm-bounds", "%s passes the length given to SetGlobalBuffer", who);
        }
    }

private:
    __gm__ T* base_ = nullptr;
    __gm__ T* limit_ = nullptr;
};

template <typename T>
class LocalTensor {
public:
    using PrimType = T;
    LocalTensor() = default;
    LocalTensor(uint32_t address, uint32_t bytes) : address_(address), bytes_(bytes) {}

    LocalTensor operator[](uint32_t offset) const {
        const uint64_t skip = static_cast<uint64_t>(offset) * sizeof(T);
        if (skip > bytes_) { emu::Fail("ub-extent", "a LocalTensor of %u bytes is offset by %llu", bytes_, static_cast<unsigned long long>(skip)); }
        return LocalTensor(address_ + static_cast<uint32_t>(skip), bytes_ - static_cast<uint32_t>(skip));
    }
    template <typename U>
    LocalTensor<U> ReinterpretCast() const { return LocalTensor<U>(address_, bytes_); }
    uint32_t GetSize() const { return bytes_ / static_cast<uint32_t>(sizeof(T)); }

    T GetValue(uint32_t offset) const {
        emu::Instruction read(emu::kS, "LocalTensor::GetValue");
        EmuExtent(static_cast<uint64_t>(offset) * sizeof(T), sizeof(T), read.name());
        const uint32_t at = address_ + offset * static_cast<uint32_t>(sizeof(T));
        read.Read(at, sizeof(T));
        ++read.core().stats.scalar_ub_accesses;
        T value;
        std::memcpy(&value, &read.core().ub[at], sizeof(T));
        return value;
    }
    void SetValue(uint32_t offset, T value) const {
        emu::Instruction write(emu::kS, "LocalTensor::SetValue");
        EmuExtent(static_cast<uint64_t>(offset) * sizeof(T), sizeof(T), write.name());
        const uint32_t at = address_ + offset * static_cast<uint32_t>(sizeof(T));
        write.Write(at, sizeof(T));
        ++write.core().stats.scalar_ub_accesses;
        std::memcpy(&write.core().ub[at], &value, sizeof(T));
    }

    uint32_t EmuAddress() const { return address_; }
    void EmuAligned(const char* who) const {
        if (address_ % emu::kBlockBytes != 0) { emu::Fail("ub-alignment", "%s: operand at UB byte %u is not 32-byte aligned", who, address_); }
    }
    void EmuExtent(uint64_t offset, uint64_t bytes, const char* who) const {
        if (offset + bytes > bytes_) {
            emu::Fail("ub-extent", "%s: bytes [%llu, %llu) of an operand that has %u", who, static_cast<unsigned long long>(offset),
                      static_cast<unsigned long long>(offset + bytes), bytes_);
        }
    }
    T* EmuData(uint64_t offset = 0) const { return reinterpret_cast<T*>(&emu::CurrentCore().ub[address_ + offset]); }

private:
    uint32_t address_ = 0;
    uint32_t bytes_ = 0;
};

}  // namespace AscendC
