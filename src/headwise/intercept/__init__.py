"""Interception of the attention calls of any model: to observe their weights or to change their heads' output.

    model(x)      hooks         sdpa_calls.py or   interceptors      attend_observed     statistics
       |       install.py       another route     interceptor.py     or row_blocks    statistics/tally
       |            |                  |                 |                 |                 |
       |-- module-->| push ModuleCall  |                 |                 |                 |
       |            |   (session.py)   |                 |                 |                 |
       |-- attention call ------------>| handlers_of_call|                 |                 |
       |            |                  |-- Call -------->| observe(call)   |                 |
       |            |                  |<- Observation --|                 |                 |
       |            |                  |-- Call -------->| change(call)    |                 |
       |            |                  |<- Change -------|                 |                 |
       |            |                  |-- Problem, or weights ----------->|                 |
       |            |                  |                 |                 |-- RowBlock ---->| add (repeated)
       |            |                  |<- output (of a Problem) ----------|                 |
       |            |                  |-- on_end ------>| adds the tally to the results     |
       |            |                  |-- HeadOutput -->| the Change      |                 |
       |            |                  |<- changed output|                 |                 |
       |<- changed output -------------|                 |                 |                 |
       |-- end ---->| pop ModuleCall   |                 |                 |                 |

A model's function                       is intercepted by
`scaled_dot_product_attention`           `sdpa_calls`
attention functions of `transformers`    `hf_calls`, where the library dispatches them
softmax of products, under any name      `eager_softmax`: the result is taken as the weights, and their product with the
                                         values as the output
a product that averages in another way   `trace/unread`: a warning names the module
an operator of another library           `fused_functions`: a warning names the module if it may compute attention
`headwise.attend`                        `call_handlers.answer_intercepted`, by `attend`'s hook

`handlers_of_call` in `call_handlers.py` passes each call to the interceptors: the one of `watch`, a gate, a survey.
"""
