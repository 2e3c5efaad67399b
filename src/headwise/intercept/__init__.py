"""Interception of the attention calls of any model: to observe their weights or to change their heads' output.

    model(x)      hooks         an adapter or      interceptors      attend_observed     statistics
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
`scaled_dot_product_attention`           `adapters/sdpa`
attention functions of `transformers`    `adapters/transformers_attention`, where the library dispatches them
functions of engines                     `adapters/library_functions`, wherever the model refers to them
softmax of products, under any name      `eager_softmax`: the result is taken as the weights, and their product with the
                                         values as the output
a product that averages in another way   `trace/unread`: a warning names the module
an operator of another library           `fused_functions`: a warning names the module if it may compute attention
`headwise.attend`                        `adapters/headwise_attend`, by `attend`'s hook

`answered` in `answer.py` answers a call, and `handlers_of_call` in `call_handlers.py` passes it to the interceptors:
the one of `watch`, a gate, a survey.
"""
