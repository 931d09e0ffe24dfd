use proptest::prelude::*;

use super::*;

#[test]
fn parameters_are_those_the_authors_publish() {
    for model in Model::catalogue() {
        if let Some(published) = model.published {
            let error = model.parameters() / (published * 1e9) - 1.0;
            assert!(
                error.abs() < 0.03,
                "{}: {:.4e}, {error:+.3}",
                model.name,
                model.parameters()
            );
        }
        if let Some(active) = model.published_active {
            let error = model.active_parameters() / (active * 1e9) - 1.0;
            assert!(
                error.abs() < 0.11,
                "{}: {:.4e}, {error:+.3}",
                model.name,
                model.active_parameters()
            );
        }
    }
}

#[test]
fn every_name_finds_its_own_model() {
    for model in Model::catalogue() {
        for name in model.names() {
            assert_eq!(Model::named(name).unwrap().name, model.name, "{name}");
        }
        let text = toml::to_string(model).unwrap();
        assert_eq!(&Model::from_toml(&text).unwrap(), model);
    }
    assert_eq!(Model::named("deepseek-ai/DeepSeek-R1").unwrap().name, "deepseek-v3");
    assert!(matches!(Model::named("llama-9"), Err(ModelError::Unknown { .. })));
}

#[test]
fn a_name_can_describe_a_gpt_or_cut_a_model() {
    let gpt = Model::named("GPT 175B h12288 L96 a96").unwrap();
    assert!((gpt.parameters() / 174.6e9 - 1.0).abs() < 0.01, "{}", gpt.parameters());
    let cut = Model::named("Llama-3.1 405B proxy 8 layers").unwrap();
    assert_eq!(cut.layers(), 8);
    let mixed = Model::named("deepseek-v3").unwrap().with_layers(20).unwrap();
    assert_eq!(mixed.layers(), 20);
}

#[test]
fn operations_are_two_for_each_parameter_and_attention_on_top() {
    let model = Model::named("llama-3.1-8b").unwrap();
    let weights = 2.0 * (model.parameters() - model.embedding_parameters());
    let attention = 4.0 * 32.0 * 4096.0 * 8192.0;
    let counted = model.forward_operations(8192, false);
    assert!((counted / (weights + attention) - 1.0).abs() < 1e-3);
    assert!(model.forward_operations(8192, true) < counted);
}

#[test]
fn what_does_not_hold_together_is_refused() {
    let text = toml::to_string(&Model::named("mixtral-8x7b").unwrap()).unwrap();
    let more = text.replace("chosen = 2", "chosen = 9");
    assert!(matches!(
        Model::from_toml(&more),
        Err(ModelError::OutOfRange { field: "chosen", .. })
    ));
    let odd = text.replace("kv_heads = 8", "kv_heads = 7");
    assert!(matches!(Model::from_toml(&odd), Err(ModelError::Indivisible { .. })));
    assert!(matches!(Model::from_toml("name = 3"), Err(ModelError::Syntax(_))));
}

proptest! {
    #[test]
    fn no_name_panics(name in ".{0,40}") {
        let _ = Model::named(&name);
    }

    #[test]
    fn cutting_keeps_the_number_of_layers(layers in 1u32..200, which in 0usize..64) {
        let models = Model::catalogue();
        let model = &models[which % models.len()];
        prop_assert_eq!(model.with_layers(layers).unwrap().layers(), layers);
    }
}

#[test]
fn every_model_reads_back_from_its_file() {
    for model in Model::catalogue() {
        assert_eq!(Model::from_toml(&model.to_toml()).as_ref(), Ok(model), "{}", model.name);
    }
}
