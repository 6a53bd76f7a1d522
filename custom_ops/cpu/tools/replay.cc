// Runs the kernel core without onnxruntime: reads calls from standard input, writes their results to standard output,
// until the input ends. For instruction sets that run in an emulator and for sanitizer builds; tests/unit/cpu/
// core_process.py is the other end.
//
// A request is a line of text, then raw tensors in the order of the inputs:
//   microsoft compute cache H G has_scale scale softcap window causal rotary interleaved offset epsilon k_quant v_quant
//   latent v_head_size slopes... (their number first), then for each of the 17 inputs: its rank, or -1 when absent, and
//   its dimensions and bytes
// A reply is "error <message>\n", or "ok <bytes of output, key cache, value cache, k scale, v scale>\n" and those bytes.
#include <cstdio>
#include <iostream>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "../paged_attention.h"

namespace {

using namespace pagegraft;

struct Request {
  Config config;
  Call call;
  std::vector<char> data[contract::kInputCount];  // exactly as large as the tensor, so that sanitizers see its ends
};

template <class T>
T number(std::istream& in) {
  std::int64_t value = 0;
  in >> value;
  return static_cast<T>(value);
}

void read_config(std::istream& in, Config* c) {
  c->microsoft_domain = number<int>(in) != 0;
  c->compute = number<Type>(in);
  c->cache = number<Type>(in);
  in >> c->num_heads >> c->kv_num_heads;
  c->has_scale = number<int>(in) != 0;
  in >> c->scale >> c->softcap >> c->window;
  c->causal = number<int>(in) != 0;
  c->rotary = number<int>(in) != 0;
  c->interleaved = number<int>(in) != 0;
  in >> c->rotary_offset >> c->epsilon;
  c->k_quant = number<Quant>(in);
  c->v_quant = number<Quant>(in);
  c->latent = number<int>(in) != 0;
  in >> c->v_head_size;
  c->slopes.resize(number<std::size_t>(in));
  for (float& slope : c->slopes) in >> slope;
}

bool read_request(Request* request) {
  std::string line;
  if (!std::getline(std::cin, line)) return false;
  std::istringstream in(line);
  read_config(in, &request->config);
  for (std::size_t i = 0; i < contract::kInputCount; ++i) {
    Tensor& tensor = request->call.in[i];
    tensor.rank = number<int>(in);
    if (tensor.rank < 0) {
      tensor.rank = 0;
      continue;
    }
    for (int d = 0; d < tensor.rank; ++d) in >> tensor.dims[d];
    request->data[i].resize(number<std::size_t>(in));
    std::cin.read(request->data[i].data(), static_cast<std::streamsize>(request->data[i].size()));
    tensor.data = request->data[i].data();
    tensor.present = true;
  }
  return static_cast<bool>(std::cin);
}

// Every index on its own thread in turn: the order of ends is up to the system.
void threaded(void*, std::int64_t count, void (*body)(void*, std::size_t), void* data) {
  std::vector<std::thread> threads;
  for (std::int64_t i = 0; i < (count < 4 ? count : 4); ++i) {
    threads.emplace_back([=] {
      for (std::int64_t k = i; k < count; k += 4) body(data, static_cast<std::size_t>(k));
    });
  }
  for (std::thread& thread : threads) thread.join();
}

std::string run_request(Request* request, std::vector<char>* output) {
  std::string error = check_config(request->config);
  Sizes sizes;
  if (error.empty()) error = check_shapes(request->config, request->call, &sizes);
  if (error.empty()) error = check_values(request->config, request->call, sizes);
  if (!error.empty()) return error;
  output->assign(static_cast<std::size_t>(sizes.T * sizes.H * sizes.Dv * element_size(request->config.compute)), '\xff');
  Call& call = request->call;
  call.output = output->data();
  call.key_cache = request->data[contract::kKeyCache].data();
  call.value_cache = request->config.latent ? call.key_cache : request->data[contract::kValueCache].data();
  call.k_scale = reinterpret_cast<float*>(request->data[contract::kKScale].data());
  call.v_scale = reinterpret_cast<float*>(request->data[contract::kVScale].data());
  return run(request->config, call, sizes, Parallel{threaded, nullptr});
}

}  // namespace

int main() {
  std::ios::sync_with_stdio(false);
  if (!isa_error().empty()) {
    std::cerr << isa_error() << "\n";
    return 1;
  }
  std::cout << isa_name() << "\n" << std::flush;
  for (;;) {
    Request request;
    if (!read_request(&request)) return 0;
    std::vector<char> output;
    const std::string error = run_request(&request, &output);
    if (!error.empty()) {
      std::cout << "error " << error << "\n" << std::flush;
      continue;
    }
    const std::vector<char>* parts[] = {&output, &request.data[contract::kKeyCache], &request.data[contract::kValueCache],
                                        &request.data[contract::kKScale], &request.data[contract::kVScale]};
    std::cout << "ok";
    for (const auto* part : parts) std::cout << " " << part->size();
    std::cout << "\n";
    for (const auto* part : parts) std::cout.write(part->data(), static_cast<std::streamsize>(part->size()));
    std::cout << std::flush;
  }
}
