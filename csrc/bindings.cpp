// Python bindings of the kernels: they take raw addresses, copy nothing, and release the GIL.
//
// Python (kernels/native) has checked shapes and types; they are not checked here.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "cpu.hpp"
#include "experts.hpp"
#include "ggml_blocks.hpp"
#include "layer.hpp"
#include "operators.hpp"
#include "shared_gather.hpp"
#include "stored_rows.hpp"
#include "stream.hpp"
#include "threads.hpp"

namespace nb = nanobind;
using namespace nb::literals;
using namespace twostroke;

NB_MODULE(_native, m) {
  nb::set_leak_warnings(false);  // objects that live as long as the process are never freed
  auto release = nb::call_guard<nb::gil_scoped_release>();
  m.attr("MAX_HEAD_DIM") = MAX_HEAD_DIM;
  m.attr("ROOM_KEPT") = ROOM_KEPT;
  m.def("levels", [] { return usable_levels(); });
  m.def("set_num_threads", &set_num_threads, release);
  m.def("num_threads", &num_threads);
  m.def("packed_bytes", &packed_bytes);
  m.def("row_of_channel", &row_of_channel);
  m.def("pack_linear", &pack_linear, release);
  m.def("unpack_rows", &unpack_rows, release);
  m.def("ggml_types", &ggml_types);
  m.def(
      "unpack_blocks",
      [](const std::string& type, uintptr_t blocks, int64_t num_blocks, uintptr_t codes, uintptr_t scales, uintptr_t mins,
         uintptr_t super_scales, uintptr_t super_mins) {
        unpack_blocks(type, blocks, num_blocks, {codes, scales, mins, super_scales, super_mins});
      },
      release);
  nb::class_<WeightFormat>(m, "WeightFormat")
      .def("__init__", [](WeightFormat* format, int bits, int64_t group, bool has_min, bool has_super_blocks, int table) {
        new (format) WeightFormat{bits, group, has_min, has_super_blocks, (CodeTable)table};
      });
  m.def("packed_quantized_bytes", &packed_quantized_bytes);
  m.def(
      "pack_quantized",
      [](uintptr_t codes, uintptr_t scales, uintptr_t mins, uintptr_t super_scales, uintptr_t super_mins, uintptr_t packed,
         int64_t n, int64_t k, bool gated, const WeightFormat& format) {
        pack_quantized({codes, scales, mins, super_scales, super_mins}, packed, n, k, gated, format);
      },
      release);
  m.def(
      "pack_stored",
      [](const std::string& type, uintptr_t files, uintptr_t offsets, uintptr_t packed, int64_t n, int64_t k, bool gated,
         const WeightFormat& format) {
        return pack_stored(type, {(const int32_t*)files, (const int64_t*)offsets}, packed, n, k, gated, format);
      },
      release);
  m.def("checksum", &checksum, release);
  m.def("read_stream", &read_stream, release);
  m.def("unpack_quantized_rows", &unpack_quantized_rows, release);
  m.def("kernels", &kernels_of, nb::rv_policy::reference);
  nb::class_<SharedGather>(m, "SharedGather")
      .def_static("memory_bytes", &SharedGather::memory_bytes)
      .def(nb::init<uintptr_t, int, int, int64_t>())
      .def("start",
           [](SharedGather& gather, uintptr_t local, uintptr_t out, std::vector<int64_t> widths, int64_t num_rows) {
             gather.start(reinterpret_cast<const uint8_t*>(local), reinterpret_cast<uint8_t*>(out), std::move(widths),
                          num_rows);
           })
      .def("advance", &SharedGather::advance, release);
  nb::class_<StepAttention>(m, "StepAttention").def("attention", &attention, release);
  nb::class_<PackedLinear>(m, "PackedLinear")
      .def("__init__",
           [](PackedLinear* to, const Kernels& kernels, uintptr_t w, uintptr_t bias, int64_t n, int64_t k, int gate, int type) {
             new (to) PackedLinear(kernels, w, bias, n, k, gate, type);
           })
      .def("__init__",
           [](PackedLinear* to, const Kernels& kernels, uintptr_t w, uintptr_t bias, int64_t n, int64_t k, int gate, int type,
              const WeightFormat& format, uintptr_t order, bool quantizes_inputs) {
             new (to) PackedLinear(kernels, w, bias, n, k, gate, type, QuantizedInputs{format, order, quantizes_inputs});
           })
      .def("multiply", &PackedLinear::multiply, release);
  nb::class_<RouterRules>(m, "RouterRules")
      .def("__init__",
           [](RouterRules* to, int64_t num_experts, int64_t num_chosen, bool is_sigmoid, bool is_renormalized, double scale,
              int64_t num_groups, int64_t num_chosen_groups) {
             new (to) RouterRules{num_experts, num_chosen, is_sigmoid, is_renormalized, scale, num_groups, num_chosen_groups};
           })
      .def("route", &route, release);
  nb::class_<PackedExperts>(m, "PackedExperts")
      .def(nb::init<std::vector<const PackedLinear*>>())
      .def_prop_ro("num_multiplied", &PackedExperts::num_multiplied)
      .def("multiply", &PackedExperts::multiply, release)
      .def("multiply_and_add", &PackedExperts::multiply_and_add, release)
      .def("add", &PackedExperts::add, release);
  nb::class_<Norm>(m, "Norm").def("__init__", [](Norm* to, uintptr_t weight, float eps, int weight_type) {
    new (to) Norm{weight, eps, weight_type};
  });
  nb::class_<FeedForward>(m, "FeedForward");
  nb::class_<GatedMlp, FeedForward>(m, "GatedMlp").def(nb::init<const PackedLinear&, const PackedLinear&>());
  nb::class_<Experts, FeedForward>(m, "Experts")
      .def("__init__",
           [](Experts* to, const PackedLinear& router, const RouterRules& rules, uintptr_t correction, uintptr_t expert_scales,
              uintptr_t counts, const PackedExperts& gated, const PackedExperts& down, const PackedLinear* shared_inner,
              const PackedLinear* shared_down) {
             new (to) Experts({&router, rules, correction, expert_scales, counts, &gated, &down, shared_inner, shared_down});
           },
           "router"_a, "rules"_a, "correction"_a, "expert_scales"_a, "counts"_a, "gated"_a, "down"_a, "shared_inner"_a.none(),
           "shared_down"_a.none());
  nb::class_<DecoderLayer>(m, "DecoderLayer")
      .def("__init__",
           [](DecoderLayer* to, const Kernels& kernels, const std::vector<const Norm*>& norms, std::vector<const PackedLinear*> qkv,
              const PackedLinear& output, const FeedForward& feed_forward, float scale, float cap, uintptr_t sinks,
              uintptr_t slopes, int64_t hidden_size, int64_t q_size, int type) {
             LayerParts parts{*norms.at(0), *norms.at(1), *norms.at(2), *norms.at(3), *norms.at(4), std::move(qkv), &output,
                              &feed_forward, scale, cap, sinks, slopes};
             new (to) DecoderLayer(kernels, parts, hidden_size, q_size, type);
           })
      .def_prop_ro("room_bytes", &DecoderLayer::room_bytes)
      .def("run", &DecoderLayer::run, release);
  nb::class_<Kernels>(m, "Kernels")
      .def_prop_ro("level", [](const Kernels& kernels) { return std::string(kernels.level); })
      .def("quantize_weight", &quantize_weight, release)
      .def("rms_norm", &rms_norm, release)
      .def("rotate", &rotate, release)
      .def("step_attention", &step_attention)
      .def("argmax", &argmax, release)
      .def("gumbel_argmax", &gumbel_argmax, release)
      .def("filtered_argmax", &filtered_argmax, release);
}
