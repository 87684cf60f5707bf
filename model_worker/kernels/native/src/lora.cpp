// LoRA adapters: y += scale * (x A^T) B^T, each row of x with the A and B of its own adapter, or with none.
//
// The rows of a step are sorted by adapter once (sort_rows). A layer's call then takes blocks of rows that share an
// adapter: all of x A^T first, then the outputs, which are added to y. Each sum is taken in one order whatever the
// number of rows, so a row gives the same bits in any batch. Adapters may have different ranks, padded to whole panels.
#include <algorithm>
#include <vector>

#include "linear_task.h"

namespace carousel {

constexpr int kMaxParts = 3;
constexpr int kExpandPanels = 2;
constexpr int kExpandRows = kLanes == 16 ? 6 : 3;
constexpr int kPanelsOfTask = 16;

// The binding mirrors all of them field by field.
struct LoraPart {
  const uint32_t* b;  // packed [columns, rank], panels filled with zeros
  int32_t column;     // first output that it changes
  int32_t columns;
  int32_t hidden;  // first of its elements of x A^T
  int32_t rank;    // whole words of 32 bits
  float scale;
};

struct LoraSlot {
  const uint32_t* a;    // packed [hidden_size, k], panels filled with zeros; null: nothing is added
  int32_t hidden_size;  // a multiple of 16
  int32_t num_parts;
  LoraPart parts[kMaxParts];
};

struct SortRowsCall {
  const int64_t* rows;         // [num_seqs]
  const int64_t* query_start;  // [num_seqs + 1]
  const int32_t* row_slots;    // slot of each row; negative: none
  int32_t* order;              // out [num_tokens]: tokens that have a slot, ordered by slot
  int32_t* begins;             // out [num_slots + 1]: begin of each slot's tokens
  int32_t num_tokens;
  int32_t num_seqs;
  int32_t num_slots;
};

struct LoraCall {
  const void* x;          // [num_rows, k]
  void* y;                // [num_rows, n]
  void* hidden;           // [num_rows, max_hidden], as x: scratch
  const int32_t* order;   // of SortRowsCall
  const int32_t* begins;  // the same
  const LoraSlot* slots;  // [num_slots] of this layer
  int32_t num_rows;
  int32_t n;
  int32_t k;
  int32_t max_hidden;
  int32_t num_slots;
  int32_t dtype;
  int32_t num_threads;
};

namespace {

int slot_of(const SortRowsCall& call, int seq) {
  const int slot = call.row_slots[call.rows[seq]];
  return slot < call.num_slots ? slot : -1;
}

void sort_rows(const SortRowsCall& call) {
  std::fill_n(call.begins, call.num_slots + 1, 0);
  for (int seq = 0; seq < call.num_seqs; ++seq) {
    const int slot = slot_of(call, seq);
    if (slot >= 0) call.begins[slot + 1] += (int32_t)(call.query_start[seq + 1] - call.query_start[seq]);
  }
  for (int slot = 0; slot < call.num_slots; ++slot) call.begins[slot + 1] += call.begins[slot];
  if (call.begins[call.num_slots] == 0) return;
  for (int seq = 0; seq < call.num_seqs; ++seq) {
    const int slot = slot_of(call, seq);
    if (slot < 0) continue;
    for (int64_t token = call.query_start[seq]; token < call.query_start[seq + 1]; ++token) {
      call.order[call.begins[slot]++] = (int32_t)token;
    }
  }
  // Each begin has become its end.
  std::copy_backward(call.begins, call.begins + call.num_slots, call.begins + call.num_slots + 1);
  call.begins[0] = 0;
}

// Rows with one adapter, at most as many as a task of a linear layer has.
struct RowBlock {
  const LoraSlot* slot;
  int first;  // in `order`, and in `hidden`
  int count;
};

// A block, and some panels of its weight.
struct PanelTask {
  const RowBlock* block;
  const LoraPart* part;
  int panel;
  int panels;
};

template <class Product, class T>
class Adapters {
 public:
  explicit Adapters(const LoraCall& call) : call_(call) {}

  void run() {
    blocks_.clear();
    for (int s = 0; s < call_.num_slots; ++s) {
      const LoraSlot& slot = call_.slots[s];
      if (!slot.a) continue;
      for (int first = call_.begins[s]; first < call_.begins[s + 1]; first += kTaskRows) {
        blocks_.push_back({&slot, first, std::min(kTaskRows, call_.begins[s + 1] - first)});
      }
    }
    if (blocks_.empty()) return;
    tasks_.clear();
    int64_t work = 0;
    const int few = blocks_.size() >= 2 * (size_t)call_.num_threads ? kTaskPanels : 1;
    for (const RowBlock& block : blocks_) {
      work += (int64_t)block.count * block.slot->hidden_size * call_.k;
      add_tasks(block, nullptr, block.slot->hidden_size / kPanel, few);
    }
    for_tasks(work, [&](const PanelTask& task) { shrink(task); });
    tasks_.clear(), work = 0;
    for (const RowBlock& block : blocks_) {
      for (const LoraPart* part = block.slot->parts; part < block.slot->parts + block.slot->num_parts; ++part) {
        work += (int64_t)block.count * part->rank * part->columns;
        add_tasks(block, part, (part->columns + kPanel - 1) / kPanel, kPanelsOfTask);
      }
    }
    for_tasks(work, [&](const PanelTask& task) { expand(task); });
  }

 private:
  using Unit = typename Product::Unit;
  static constexpr int kWord = Product::kUnits * Product::kDepth;  // elements

  void add_tasks(const RowBlock& block, const LoraPart* part, int panels, int most) {
    for (int panel = 0; panel < panels; panel += most) {
      tasks_.push_back({&block, part, panel, std::min(most, panels - panel)});
    }
  }

  template <class Body>
  void for_tasks(int64_t work, const Body& body) const {
    const std::vector<PanelTask>& tasks = tasks_;
    const int threads = work < kMinParallelWork ? 1 : call_.num_threads;
    parallel_for(threads, (int)tasks.size(), [&](int task) { body(tasks[task]); });
  }

  T* hidden_of(const RowBlock& block) const { return (T*)call_.hidden + (int64_t)block.first * call_.max_hidden; }

  // The block's rows of x, contiguous: in place if they are contiguous already.
  const T* rows_of(const RowBlock& block) const {
    const int32_t* order = call_.order + block.first;
    const T* x = (const T*)call_.x;
    if (order[block.count - 1] - order[0] == block.count - 1) return x + (int64_t)order[0] * call_.k;
    static thread_local std::vector<T> gathered;
    gathered.resize((size_t)block.count * call_.k);
    for (int r = 0; r < block.count; ++r) {
      std::copy_n(x + (int64_t)order[r] * call_.k, call_.k, gathered.data() + (int64_t)r * call_.k);
    }
    return gathered.data();
  }

  void shrink(const PanelTask& task) const {
    LinearCall product{};
    product.x = rows_of(*task.block);
    product.weight = task.block->slot->a;
    product.out = hidden_of(*task.block);
    product.num_rows = task.block->count;
    product.n = task.block->slot->hidden_size;
    product.k = call_.k;
    product.dtype = call_.dtype;
    Task<Product, T, T>(product, 0, task.block->count, task.panel, task.panels).run();
  }

  void expand(const PanelTask& task) const {
    const RowBlock& block = *task.block;
    const LoraPart& part = *task.part;
    const int words = part.rank / kWord, units = part.rank / Product::kDepth;
    static thread_local std::vector<Unit> taken;
    taken.resize((size_t)block.count * units);
    const T* hidden = hidden_of(block) + part.hidden;
    for (int r = 0; r < block.count; ++r) {
      Product::widen_x(hidden + (int64_t)r * block.slot->hidden_size, part.rank, taken.data() + (int64_t)r * units);
    }
    int panel = task.panel;
    const int end = panel + task.panels;
    for (; panel + kExpandPanels <= end; panel += kExpandPanels) {
      expand_rows<kExpandPanels>(block, part, panel, words, taken.data());
    }
    for (; panel < end; ++panel) expand_rows<1>(block, part, panel, words, taken.data());
  }

  template <int Panels>
  void expand_rows(const RowBlock& block, const LoraPart& part, int panel, int words, const Unit* x) const {
    const int32_t* order = call_.order + block.first;
    const int units = words * Product::kUnits;
    int r = 0;
    for (; r + kExpandRows <= block.count; r += kExpandRows) {
      add<kExpandRows, Panels>(part, panel, words, x + (int64_t)r * units, order + r);
    }
    for (; r < block.count; ++r) add<1, Panels>(part, panel, words, x + (int64_t)r * units, order + r);
  }

  template <int Rows, int Panels>
  void add(const LoraPart& part, int panel, int words, const Unit* x, const int32_t* order) const {
    const uint32_t* b = part.b + (int64_t)panel * words * kPanel;
    const int units = words * Product::kUnits;
    vfloat sum[Rows][Panels][kVectors] = {};
    for (int word = 0; word < words; ++word) {
      add_word<0>(b + word * kPanel, words, x + word * Product::kUnits, units, sum);
      if constexpr (Product::kUnits == 2) add_word<1>(b + word * kPanel, words, x + word * 2 + 1, units, sum);
    }
    for (int r = 0; r < Rows; ++r) {
      T* y = (T*)call_.y + (int64_t)order[r] * call_.n + part.column;
      for (int p = 0; p < Panels; ++p) {
        for (int v = 0; v < kVectors; ++v) {
          const int column = (panel + p) * kPanel + v * kLanes;
          add_to(y + column, part.columns - column, sum[r][p][v] * part.scale);
        }
      }
    }
  }

  template <int unit, int Rows, int Panels>
  static void add_word(const uint32_t* b, int words, const Unit* x, int units, vfloat (&sum)[Rows][Panels][kVectors]) {
#pragma GCC unroll 4
    for (int p = 0; p < Panels; ++p) {
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        const auto w = Product::template units_of<unit>(b + (int64_t)p * words * kPanel, v * kLanes);
#pragma GCC unroll 8
        for (int r = 0; r < Rows; ++r) sum[r][p][v] = Product::add(sum[r][p][v], w, x[r * units]);
      }
    }
  }

  // left: number of outputs of the part from here on, which may be less than a vector, or 0.
  static void add_to(T* y, int left, vfloat value) {
    if (left >= kLanes) return store(y, load(y) + value);
    if (left <= 0) return;
    T last[kLanes] = {};
    std::copy_n(y, left, last);
    store(last, load(last) + value);
    std::copy_n(last, left, y);
  }

  const LoraCall& call_;
  static thread_local std::vector<RowBlock> blocks_;
  static thread_local std::vector<PanelTask> tasks_;
};

template <class Product, class T>
thread_local std::vector<RowBlock> Adapters<Product, T>::blocks_;
template <class Product, class T>
thread_local std::vector<PanelTask> Adapters<Product, T>::tasks_;

void add_adapters(const LoraCall& call) {
  if (call.begins[call.num_slots] == 0) return;
  with_dtype(call.dtype, [&](auto element) {
    Adapters<ProductOf<decltype(element)>, decltype(element)>(call).run();
  });
}

}  // namespace

}  // namespace carousel

CAROUSEL_EXPORT void carousel_sort_rows(const carousel::SortRowsCall* call) { carousel::sort_rows(*call); }

CAROUSEL_EXPORT void carousel_lora(const carousel::LoraCall* call) { carousel::add_adapters(*call); }
