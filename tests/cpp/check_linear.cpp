// Linear layers of float32 and 16 bits, gates, and the packing of weights.
#include "check.h"
#include "linear.cpp"
#include "pack.cpp"

namespace {

using namespace carousel;

double silu(double x) { return x / (1 + std::exp(-x)); }

template <class T>
void check_shape(int rows, int n, int k, bool has_bias, bool is_float, bool has_gate) {
  const int room = (n + kPanel - 1) / kPanel * kPanel, width = has_gate ? n / 2 : n;
  const auto x = check::narrow<T>(check::normal(rows * k, 1)), bias = check::narrow<T>(check::normal(n, 2));
  auto weight = check::narrow<T>(check::normal(n * k, 3, 0.1f));
  const auto wide_x = check::wide(x), wide_weight = check::wide(weight), wide_bias = check::wide(bias);
  std::vector<double> expected;
  for (int r = 0; r < rows; ++r) {
    std::vector<double> sums(n);
    for (int j = 0; j < n; ++j) {
      for (int c = 0; c < k; ++c) sums[j] += wide_x[r * k + c] * wide_weight[j * k + c];
      if (has_bias) sums[j] += wide_bias[j];
    }
    for (int j = 0; j < width; ++j) expected.push_back(has_gate ? silu(sums[j]) * sums[j + width] : sums[j]);
  }
  weight.resize(room * k);
  carousel_pack_panels(weight.data(), n, k * sizeof(T), std::is_same_v<T, fp16> ? 2 : 4, 2);
  std::vector<T> out(rows * width);
  std::vector<float> floats(rows * width);
  LinearCall call{};
  call.x = x.data(), call.weight = (uint32_t*)weight.data(), call.bias = has_bias ? bias.data() : nullptr;
  call.out = is_float ? (void*)floats.data() : (void*)out.data();
  call.num_rows = rows, call.n = n, call.k = k, call.dtype = check::kType<T>, call.out_is_float = is_float;
  call.gate = has_gate ? 1 + kSilu : 0, call.num_threads = 2;
  carousel_linear(&call);
  const std::string name = "linear " + std::to_string(rows) + " " + std::to_string(n) + " " + std::to_string(k);
  std::vector<T> streamed(rows * width);
  std::vector<float> streamed_floats(rows * width);
  call.out = is_float ? (void*)streamed_floats.data() : (void*)streamed.data(), call.in_huge_pages = 1;
  carousel_linear(&call);
  check::near(name + ", bits", streamed, check::wide(out), 0, 0);
  check::near(name + ", bits", streamed_floats, check::wide(floats), 0, 0);
  const double scale = 1 + k / 500.0;  // what the terms of a sum that cancels are rounded by
  if (is_float) {
    check::near(name, floats, expected, 1e-4, scale);
  } else {
    check::near(name, out, expected, has_gate ? 2 * check::kStep<T> : check::kStep<T>, scale);
  }
}

template <class T>
void check_dtype() {
  for (int rows : {1, 2, 3, 5, 6, 7, 13, 97}) {
    for (int k : {32, 70, 600}) {
      for (int n : {16, 97, 160}) {
        check_shape<T>(rows, n, k, rows % 2, false, false);
        check_shape<T>(rows, n, k, rows % 2, true, false);
      }
      check_shape<T>(rows, 96, k, rows % 2, false, true);
    }
  }
  check_shape<T>(3, 40, 4500, true, false, false);
}

}  // namespace

void check_linear() {
  check_dtype<float>();
  check_dtype<bf16>();
  check_dtype<fp16>();
}
