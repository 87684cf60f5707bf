// Norms, activations, and what is combined.
#include "check.h"
#include "elementwise.cpp"

namespace {

using namespace carousel;

double activation(int kind, double x) {
  if (kind == kSilu) return x / (1 + std::exp(-x));
  if (kind == kGelu) return 0.5 * x * (1 + std::erf(x / std::sqrt(2.0)));
  return 0.5 * x * (1 + std::tanh(std::sqrt(2 / 3.14159265358979) * (x + 0.044715 * x * x * x)));
}

template <class T, class W>
void check_norm(bool centers) {
  const int rows = 7, size = 80;
  const auto x = check::narrow<T>(check::normal(rows * size, 1));
  const auto weight = check::narrow<W>(check::normal(size, 2)), bias = check::narrow<W>(check::normal(size, 3));
  auto residual = check::narrow<T>(check::normal(rows * size, 4));
  const auto wide_x = check::wide(x), wide_residual = check::wide(residual);
  std::vector<double> sums, expected;
  for (int r = 0; r < rows; ++r) {
    double mean = 0, square = 0;
    std::vector<double> row;
    for (int c = 0; c < size; ++c) {
      row.push_back(to_float(check::narrow<T>((float)(wide_x[r * size + c] + wide_residual[r * size + c]))));
      mean += centers ? row[c] / size : 0;
    }
    for (double value : row) square += (value - mean) * (value - mean) / size;
    for (int c = 0; c < size; ++c) {
      sums.push_back(row[c]);
      expected.push_back((row[c] - mean) / std::sqrt(square + 1e-5) * to_float(weight[c]) + to_float(bias[c]));
    }
  }
  std::vector<T> out(rows * size);
  NormCall call{};
  call.x = x.data(), call.residual = residual.data(), call.weight = weight.data(), call.bias = bias.data();
  call.out = out.data(), call.token_stride = size, call.tokens = rows, call.heads = 1, call.size = size;
  call.dtype = check::kType<T>, call.weight_is_float = sizeof(W) == 4, call.centers = centers, call.is_wide = 1;
  call.num_threads = 2, call.eps = 1e-5f;
  carousel_norm(&call);
  check::near("norm", out, expected, 2 * check::kStep<T>);
  check::near("norm, residual", residual, sums, 1e-7);
}

template <class T>
void check_dtype() {
  check_norm<T, T>(false);
  check_norm<T, T>(true);
  check_norm<T, float>(true);
  const int rows = 5, size = 48;
  const auto x = check::narrow<T>(check::normal(rows * 2 * size, 1));
  for (int kind : {kSilu, kGelu, kGeluTanh}) {
    std::vector<double> expected;
    for (int r = 0; r < rows; ++r) {
      for (int c = 0; c < size; ++c) {
        expected.push_back(activation(kind, to_float(x[r * 2 * size + c])) * to_float(x[(r * 2 + 1) * size + c]));
      }
    }
    std::vector<T> out(rows * size);
    ActivateCall call{x.data(), out.data(), rows, size, 1, kind, check::kType<T>, 2};
    carousel_activate(&call);
    check::near("activate", out, expected, 2 * check::kStep<T>);
  }
  const auto add = check::narrow<T>(check::normal(rows * 45, 2));
  std::vector<double> expected;
  for (int i = 0; i < rows * 45; ++i) expected.push_back(2 * std::tanh(to_float(x[i]) * 3 / 2) + to_float(add[i]));
  std::vector<T> out(rows * 45);
  CombineCall call{x.data(), add.data(), out.data(), rows, 45, check::kType<T>, 2, 3, 2};
  carousel_combine(&call);
  check::near("combine", out, expected, 4 * check::kStep<T>);
}

}  // namespace

void check_elementwise() {
  check_dtype<float>();
  check_dtype<bf16>();
  check_dtype<fp16>();
}
