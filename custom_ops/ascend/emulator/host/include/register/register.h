// Host model of the framework plugin registry.
#pragma once
#include <string>
#include <vector>

#include "graph/operator.h"

namespace domi {

using Status = uint32_t;
constexpr Status SUCCESS = 0;
constexpr Status FAILED = 1;
enum FrameworkType { CAFFE = 0, MINDSPORE = 1, TENSORFLOW = 3, ONNX = 5 };
enum class ImplyType { BUILDIN, TVM };

class OpRegistrationData {
public:
    using ParseFunction = Status (*)(const ge::Operator&, ge::Operator&);
    explicit OpRegistrationData(const char* type) : type(type) {}
    OpRegistrationData& FrameworkType(domi::FrameworkType value) {
        framework = value;
        return *this;
    }
    OpRegistrationData& OriginOpType(const std::vector<ge::AscendString>& names) {
        for (const ge::AscendString& name : names) { origins.emplace_back(name.GetString()); }
        return *this;
    }
    OpRegistrationData& ParseParamsByOperatorFn(ParseFunction function) {
        parse = function;
        return *this;
    }
    OpRegistrationData& ImplyType(domi::ImplyType) { return *this; }

    std::string type;
    domi::FrameworkType framework = CAFFE;
    std::vector<std::string> origins;
    ParseFunction parse = nullptr;
};

inline std::vector<OpRegistrationData>& Plugins() {
    static std::vector<OpRegistrationData> plugins;
    return plugins;
}
struct PluginRegistrar {
    PluginRegistrar(const OpRegistrationData& data) { Plugins().push_back(data); }
};

}  // namespace domi

#define REGISTER_CUSTOM_OP(name) static const PluginRegistrar registrar = OpRegistrationData(name)
