"""Interception of the attention calls of any model: to observe their weights or to change their heads' output.

    model(x)      hooks          patched function   interceptors       row blocks        statistics
       |       install.py       torch_patches.py   interceptor.py    attend_observed   statistics/tally
       |            |                  |                 |                 |                 |
       |-- module-->| push ModuleCall  |                 |                 |                 |
       |            | (call_stack.py)  |                 |                 |                 |
       |-- attention call ------------>| handlers_of_call|                 |                 |
       |            |                  |-- Call -------->| observe(call)   |                 |
       |            |                  |<- Observation --| change(call)    |                 |
       |            |                  |-- Problem, or weights ----------->|                 |
       |            |                  |                 |                 |-- RowBlock ---->| add
       |            |                  |                 |                 |<----------------| (repeated)
       |            |                  |                 |<- on_end -------------------------|
       |            |                  |-- HeadOutput -->| change          |                 |
       |<- changed output -------------|<----------------|                 |                 |
       |-- end ---->| pop ModuleCall   |                 |                 |                 |

A model's function                       is intercepted by
`scaled_dot_product_attention`           `sdpa_calls`
attention functions of `transformers`    `hf_calls`, where the library dispatches them
softmax in a module called attention     `eager_softmax`: its result is the weights, a product with them the output
`headwise.attend`                        `call_handlers.answer_intercepted`, by `attend`'s hook

`call_handlers` passes each call to its interceptors: `statistics_observer` for `watch`, a gate, a survey.
"""
