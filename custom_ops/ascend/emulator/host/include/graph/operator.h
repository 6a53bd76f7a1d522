// Host model of ge::Operator: a bag of attributes.
#pragma once
#include <cstdio>
#include <map>
#include <string>
#include <vector>

#include "register/op_def_registry.h"

namespace ge {

class AscendString {
public:
    AscendString() = default;
    explicit AscendString(const char* text) : text_(text) {}
    const char* GetString() const { return text_.c_str(); }

private:
    std::string text_;
};

class Operator {
public:
    Operator& SetAttr(const char* name, int64_t value) { return Keep(name, std::to_string(value)); }
    Operator& SetAttr(const char* name, float value) { return Keep(name, Text(value)); }
    Operator& SetAttr(const char* name, const AscendString& value) { return Keep(name, value.GetString()); }
    Operator& SetAttr(const char* name, const std::vector<float>& values) {
        std::string all;
        for (const float value : values) { all += (all.empty() ? "" : ",") + Text(value); }
        return Keep(name, all);
    }
    graphStatus GetAttr(const char* name, AscendString& value) const {
        const auto at = attributes.find(name);
        if (at == attributes.end()) { return GRAPH_FAILED; }
        value = AscendString(at->second.c_str());
        return GRAPH_SUCCESS;
    }

    std::map<std::string, std::string> attributes;

private:
    static std::string Text(float value) {
        char text[32];
        std::snprintf(text, sizeof(text), "%.9g", static_cast<double>(value));
        return text;
    }
    Operator& Keep(const char* name, std::string value) {
        attributes[name] = std::move(value);
        return *this;
    }
};

}  // namespace ge
