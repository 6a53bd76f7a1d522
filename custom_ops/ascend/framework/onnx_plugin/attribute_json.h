// Reads what GE's ONNX parser hands to a plugin: the node's attributes as JSON text,
//   {"attribute": [{"name": "scale", "type": 1, "f": "0.125"}, {"name": "num_heads", "type": 2, "i": 32}, ...]}.
// Floats may come as numbers or as text, and a value of zero (or an empty string) may be left out.
#pragma once
#include <cstdlib>
#include <map>
#include <string>
#include <vector>

namespace pagegraft {

// The scalars and lists of one attribute, as text; empty when the parser left a zero out.
struct OnnxAttribute {
    std::map<std::string, std::vector<std::string>> fields;

    std::string Text(const char* field) const {
        const auto at = fields.find(field);
        return at == fields.end() || at->second.empty() ? std::string() : at->second.front();
    }
    int64_t Int() const { return std::strtoll(Text("i").c_str(), nullptr, 10); }
    float Float() const { return std::strtof(Text("f").c_str(), nullptr); }
    std::vector<float> Floats() const {
        std::vector<float> values;
        const auto at = fields.find("floats");
        if (at == fields.end()) { return values; }
        for (const std::string& text : at->second) { values.push_back(std::strtof(text.c_str(), nullptr)); }
        return values;
    }
};

// A reader of the JSON subset above: objects, arrays, strings with simple escapes, and bare words (numbers).
class AttributeReader {
public:
    explicit AttributeReader(const char* text) : at_(text == nullptr ? "" : text) {}

    // False when the text is not of that form.
    bool Read(std::map<std::string, OnnxAttribute>& attributes) {
        if (!Take('{')) { return false; }
        while (!Take('}')) {
            std::string name;
            if (!String(name) || !Take(':')) { return false; }
            const bool ok = name == "attribute" ? List(attributes) : Skip();
            if (!ok || !Separator('}')) { return false; }
        }
        return true;
    }

private:
    void Blank() {
        while (*at_ == ' ' || *at_ == '\n' || *at_ == '\t' || *at_ == '\r') { ++at_; }
    }
    bool Take(char c) {
        Blank();
        if (*at_ != c) { return false; }
        ++at_;
        return true;
    }
    // After an element: a comma, or the closing character (left in place).
    bool Separator(char close) {
        Blank();
        return *at_ == close || Take(',');
    }

    bool String(std::string& out) {
        out.clear();
        if (!Take('"')) { return false; }
        for (; *at_ != '"'; ++at_) {
            if (*at_ == 0) { return false; }
            if (*at_ == '\\' && *++at_ == 0) { return false; }
            out.push_back(*at_);
        }
        ++at_;
        return true;
    }
    bool Scalar(std::string& out) {
        Blank();
        if (*at_ == '"') { return String(out); }
        out.clear();
        while (*at_ != 0 && *at_ != ',' && *at_ != '}' && *at_ != ']' && *at_ != ' ' && *at_ != '\n') { out.push_back(*at_++); }
        return !out.empty();
    }

    bool List(std::map<std::string, OnnxAttribute>& attributes) {
        if (!Take('[')) { return false; }
        while (!Take(']')) {
            OnnxAttribute attribute;
            if (!Attribute(attribute) || !Separator(']')) { return false; }
            attributes[attribute.Text("name")] = attribute;
        }
        return true;
    }

    bool Attribute(OnnxAttribute& attribute) {
        if (!Take('{')) { return false; }
        while (!Take('}')) {
            std::string field;
            if (!String(field) || !Take(':') || !Values(attribute.fields[field]) || !Separator('}')) { return false; }
        }
        return true;
    }

    bool Values(std::vector<std::string>& values) {
        Blank();
        if (*at_ == '{') { return Skip(); }   // tensors and graphs: none of the contract's attributes
        if (!Take('[')) {
            values.emplace_back();
            return Scalar(values.back());
        }
        while (!Take(']')) {
            values.emplace_back();
            if (!Scalar(values.back()) || !Separator(']')) { return false; }
        }
        return true;
    }

    bool Skip() {
        Blank();
        if (*at_ != '{' && *at_ != '[') {
            std::string ignored;
            return Scalar(ignored);
        }
        int depth = 0;
        do {
            if (*at_ == 0) { return false; }
            if (*at_ == '"') {
                std::string ignored;
                if (!String(ignored)) { return false; }
                continue;
            }
            depth += *at_ == '{' || *at_ == '[' ? 1 : *at_ == '}' || *at_ == ']' ? -1 : 0;
            ++at_;
        } while (depth > 0);
        return true;
    }

    const char* at_;
};

}  // namespace pagegraft
