// Rows to int8, and int8 linear layers.
#include "check.h"
#include "linear_int8.cpp"

namespace {

using namespace carousel;

template <class T>
void check_shape(int rows, int n, int k, bool is_extreme) {
  const int room = (n + kPanel - 1) / kPanel * kPanel;
  auto values = check::normal(rows * k, 1);
  if (is_extreme) {
    for (int i = 0; i < rows * k; ++i) values[i] = i / k % 2 ? -1.0f : 1.0f;
  }
  const auto x = check::narrow<T>(values), bias = check::narrow<T>(check::normal(n, 2));
  std::vector<uint8_t> bytes(rows * k);
  std::vector<float> x_scale(rows), weight_scale(room), out(rows * n);
  QuantizeCall quantize{x.data(), bytes.data(), x_scale.data(), rows, k, check::kType<T>, 2};
  carousel_quantize_rows(&quantize);
  for (int r = 0; r < rows; ++r) {
    float most = 0;
    for (int c = 0; c < k; ++c) most = std::max(most, std::abs(to_float(x[r * k + c])));
    std::vector<double> steps;
    std::vector<float> got;
    for (int c = 0; c < k; ++c) {
      steps.push_back(to_float(x[r * k + c]) * 127.0 / most);
      got.push_back((float)(bytes[r * k + c] - 128));
    }
    check::near("quantize", got, steps, 0.501);
    check::near("quantize, scale", std::vector<float>{x_scale[r]}, {most / 127.0}, 1e-6, 0);
  }
  std::vector<int8_t> weight(room * k);
  std::mt19937 generator(3);
  for (int i = 0; i < n * k; ++i) weight[i] = is_extreme ? (i / k % 2 ? 127 : -128) : (int)(generator() % 255) - 127;
  std::vector<int32_t> weight_sum(room);
  std::vector<double> expected;
  for (int j = 0; j < n; ++j) {
    weight_scale[j] = 0.01f + 0.001f * j;
    for (int c = 0; c < k; ++c) weight_sum[j] += weight[j * k + c];
  }
  for (int r = 0; r < rows; ++r) {
    for (int j = 0; j < n; ++j) {
      int64_t sum = 0;
      for (int c = 0; c < k; ++c) sum += (bytes[r * k + c] - 128) * weight[j * k + c];
      expected.push_back((float)sum * (double)(weight_scale[j] * x_scale[r]) + to_float(bias[j]));
    }
  }
  carousel_pack_panels(weight.data(), n, k, 4, 2);
  LinearCall call{};
  call.x = bytes.data(), call.weight = (uint32_t*)weight.data(), call.x_scale = x_scale.data();
  call.weight_scale = weight_scale.data(), call.weight_sum = weight_sum.data(), call.bias = bias.data();
  call.out = out.data(), call.num_rows = rows, call.n = n, call.k = k, call.dtype = check::kType<T>;
  call.out_is_float = 1, call.is_symmetric = !is_extreme, call.num_threads = 2;
  for (int in_huge_pages : {0, 1}) {
    call.in_huge_pages = in_huge_pages;
    std::fill(out.begin(), out.end(), NAN);
    carousel_int8_linear(&call);
    check::near("int8 linear", out, expected, 1e-6);
  }
}

}  // namespace

void check_int8() {
  for (int rows : {1, 2, 3, 5, 7, 13, 97}) {
    for (int n : {16, 97, 160}) {
      for (int k : {16, 80, 2064}) {
        check_shape<float>(rows, n, k, false);
        check_shape<bf16>(rows, n, k, false);
        check_shape<fp16>(rows, n, k, false);
      }
    }
  }
  check_shape<float>(9, 48, 65536, true);
  check_shape<float>(1, 48, 65536, true);
}
